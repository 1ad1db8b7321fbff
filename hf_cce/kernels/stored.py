"""The first slab of the logits' gradient, kept from the forward pass: what the budget holds need not be computed twice.

Before it there may be columns that lie in the memory that the weight's gradient will have: at its end, where the rows of the same
columns, at its beginning, do not reach. When these are written, so may be the others.

What is stored is exp(z − z_label), which needs no logsumexp, times (1 − (z/softcap)²) with a softcap: all it lacks to the
gradient is a factor per token, and the label's own entry. bfloat16 has the range for it as long as a token's loss is below
LIMIT; row blocks with a token above are computed anew in the backward pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.inputs import LogitInputs, Shape, TokenGrads
from hf_cce.kernels.plan import Plan, ceil_div, empty_slab, padded
from hf_cce.kernels.products import ALIGNED
from hf_cce.kernels.tiles import softcapped

LIMIT = tl.constexpr(60.0)  # nats; exp of it, and of minus it, is far from the ends of bfloat16


class Slab(NamedTuple):
    """The columns of the vocabulary from ``start`` to ``stop``."""

    start: int
    stop: int
    values: Tensor  # [N, stop − start, or more]


class ExpCache(NamedTuple):
    """What the forward pass leaves for the backward pass, which reuses the memory of the last slab for the columns after it.

    Values are exp(z − z_label) · (1 − (z/softcap)²), zero where the label is ignored.
    """

    slabs: list[Slab]  # of consecutive columns, from the first on
    label_logit: Tensor  # [N]
    active: Tensor | None  # active row blocks: see label_logits
    grad_weight: Tensor | None = None  # [V, D], to be written, if the first slab lies in its memory


class CachePlan(NamedTuple):
    """Columns of the vocabulary whose values are kept: the first ones in the dW buffer, those after them in scratch memory."""

    in_dw_buffer: int
    in_scratch: int


@triton.jit(do_not_specialize=["num_tokens", "ignore_index"])
def _label_logit_kernel(
    hidden,  # [N, D]
    weight,  # [V, D]
    bias,  # [V]
    labels,  # [N]
    order,  # [V] int32, the row of weight of each label, if GATHER
    out,  # [N], zero where the label is ignored
    live,  # [row blocks] int32, if BLOCK_M: whether a label of the block is not ignored
    tokens,  # [N] int64, the row of hidden of each token, if MOVE
    moved,  # [N, D], written, if MOVE: hidden in the order of tokens
    num_tokens,
    vocab_size,
    hidden_size,
    hidden_stride,
    weight_stride,
    ignore_index,
    logit_scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    GATHER: tl.constexpr,
    MOVE: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The diagonal of a product of tokens with the rows of their labels.

    The other entries are computed for nothing, but this way tensor cores round as they do in the logits that the logsumexp is
    made of; what they cut off then cancels in the loss of a token.
    """
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    label = tl.load(labels + rows, mask=rows < num_tokens, other=ignore_index)
    good = (label != ignore_index) & (label >= 0) & (label < vocab_size)
    if GATHER:
        label = tl.load(order + label, mask=good, other=0).to(tl.int64)
    inside = rows < num_tokens
    at = tl.load(tokens + rows, mask=inside, other=0) if MOVE else rows.to(tl.int64)
    ks = tl.arange(0, BLOCK_K)
    products = tl.zeros((BLOCK_R, BLOCK_R), tl.float32)
    for k in range(0, hidden_size, BLOCK_K):
        in_d = (k + ks < hidden_size)[None, :]
        mask = good[:, None] & in_d
        here = inside[:, None] & in_d if MOVE else mask
        h = tl.load(hidden + at[:, None] * hidden_stride + (k + ks)[None, :], mask=here, other=0.0)
        if MOVE:
            tl.store(moved + rows.to(tl.int64)[:, None] * hidden_size + (k + ks)[None, :], h, mask=here)
        w = tl.load(weight + label.to(tl.int64)[:, None] * weight_stride + (k + ks)[None, :], mask=mask, other=0.0)
        if UPCAST:
            h, w = h.to(tl.float32), w.to(tl.float32)
        products = tl.dot(h, tl.trans(w), products, input_precision=PRECISION)
    each = tl.arange(0, BLOCK_R)
    acc = tl.sum(tl.where(each[:, None] == each[None, :], products, 0.0), 1)
    if HAS_BIAS:
        acc += tl.load(bias + label, mask=good, other=0.0).to(tl.float32)
    acc *= logit_scale
    if HAS_SOFTCAP:
        acc = softcapped(acc, softcap)
    if MOVE:  # what an ignored token's hidden state holds, perhaps no numbers, was multiplied too
        acc = tl.where(good, acc, 0.0)
    tl.store(out + rows, acc, mask=inside)
    if BLOCK_M > 0:  # noqa: SIM102 (the second is no constant)
        if tl.program_id(0) * BLOCK_R % BLOCK_M == 0:
            block = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_M)
            of_block = tl.load(labels + block, mask=block < num_tokens, other=ignore_index)
            tl.store(live + tl.program_id(0) * BLOCK_R // BLOCK_M, tl.max((of_block != ignore_index).to(tl.int32), 0))


@triton.jit(do_not_specialize=["num_tokens", "first_col", "ignore_index"])
def _settle_kernel(
    values,  # [N, width], in place; rows may be longer
    label_logit,  # [N]
    labels,  # [N]
    lse,  # [N]
    grad_lse,  # [N]
    grad_label,  # [N]
    flags,  # [row blocks] int32, written: whether a token of the block is beyond the limit
    num_tokens,
    first_col,  # of the vocabulary, of values
    width,
    ignore_index,
    logit_scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_rows = rows < num_tokens
    label = tl.load(labels + rows, mask=in_rows, other=ignore_index)
    at_label = tl.load(label_logit + rows, mask=in_rows, other=0.0)
    p_label = tl.exp(at_label - tl.load(lse + rows, mask=in_rows, other=0.0))
    # Zero where the label is ignored, as the values are, whatever comes from upstream.
    g = tl.load(grad_lse + rows, mask=label != ignore_index, other=0.0)
    of_label = g * p_label + tl.load(grad_label + rows, mask=label != ignore_index, other=0.0)
    if HAS_SOFTCAP:
        of_label *= 1.0 - (at_label / softcap) * (at_label / softcap)
    at = rows.to(tl.int64)[:, None] * width + cols[None, :]
    mask = in_rows[:, None] & (cols < width)[None, :]
    x = tl.load(values + at, mask=mask, other=0.0).to(tl.float32) * (g * p_label * logit_scale)[:, None]
    x = tl.where(cols[None, :] == (label - first_col)[:, None], (of_label * logit_scale)[:, None], x)
    tl.store(values + at, x.to(values.dtype.element_ty), mask=mask)
    if tl.program_id(1) == 0 and tl.program_id(0) * BLOCK_R % BLOCK_M == 0:
        block = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_M)
        inside = block < num_tokens
        loss = tl.load(lse + block, mask=inside, other=0.0) - tl.load(label_logit + block, mask=inside, other=0.0)
        beyond = inside & ((loss <= LIMIT) == 0)  # so that not a number counts too
        tl.store(flags + tl.program_id(0) * BLOCK_R // BLOCK_M, tl.max(beyond.to(tl.int32), 0))


def plan_cache(
    shape: Shape, num_tiles: int, block_n: int, dw_block_n: int, need_weight: bool, budget: int
) -> CachePlan | None:
    """Divide the budget; None where it has no room for values that pay.

    ``block_n``: columns of a tile; ``dw_block_n``: a multiple of them, in which the dW buffer is filled.
    """
    width = _scratch_columns(shape, num_tiles, block_n, budget)
    if width == 0:
        return None
    if need_weight and width < shape.v:
        first = _dw_buffer_columns(shape, dw_block_n)
        later = _scratch_columns(shape._replace(v=shape.v - first), num_tiles, block_n, budget, first > 0)
        if later:
            return CachePlan(first, later)
    return CachePlan(0, width)


def _scratch_columns(shape: Shape, num_tiles: int, block_n: int, budget: int, several: bool = False) -> int:
    """Columns that scratch memory holds from the forward pass to the backward pass; 0 for none.

    ``several``: with other slabs before, the hidden states' gradient is a sum of products even if all columns fit.
    """
    n, d, v, dtype = shape
    if dtype == torch.float16 or n == 0:  # float16 has no range for it
        return 0
    element = dtype.itemsize
    left = budget - 4 * n * num_tiles - 8 * n
    accumulator = 4 * n * d if element < 4 else 0
    if element * n * padded(v) + (accumulator if v % ALIGNED or several else 0) <= left:
        return v
    if 2 * accumulator > budget:
        return 0
    # The slabs that follow are as wide as this one: where the statistics leave it narrow, none of them gains.
    width, later = (
        x // (element * n) // block_n * block_n for x in (min(left, budget - accumulator), budget - accumulator)
    )
    return width if 4 * width >= 3 * later else 0


def _dw_buffer_columns(shape: Shape, block_n: int) -> int:
    """Columns whose values fit into the dW buffer behind the rows of the same columns."""
    n, d, v, _ = shape
    return max((d * v - 16) // (d + n), 0) // block_n * block_n


def allocate_cache(inputs: LogitInputs, plan: CachePlan, label_logit: Tensor, active: Tensor | None) -> ExpCache:
    """The memory of the values, which ``tile_stats`` writes."""
    n, d, v, _ = inputs.shape
    first = plan.in_dw_buffer
    rest = Slab(first, min(v, first + plan.in_scratch), empty_slab(inputs.hidden, n, plan.in_scratch))
    if not first:
        return ExpCache([rest], label_logit, active)
    grad_weight = inputs.weight.new_empty((v, d))
    # At the end of the buffer: the rows of these columns, at its beginning, are written when the values have been used.
    start = (v * d - n * first) // 16 * 16
    in_dw_buffer = grad_weight.view(-1)[start : start + n * first].view(n, first)
    return ExpCache([Slab(0, first, in_dw_buffer), rest], label_logit, active, grad_weight)


def label_logits(
    inputs: LogitInputs,
    plan: Plan,
    block_m: int = 0,
    order: Tensor | None = None,  # [V] int32: the row of weight of each label, where that is not the label itself
    tokens: Tensor | None = None,  # [N] int64: the row of hidden of each token, where that is not the token itself
    moved: Tensor | None = None,  # [N, D] contiguous, written: those rows in that order, which are read for it anyway
) -> tuple[Tensor, Tensor | None]:
    """The logit of each token's label, [N] float32, zero where it is ignored.

    With ``block_m`` also the active row blocks, [⌈N / block_m⌉] int32: 1 where a label of so many tokens is not ignored, else 0.
    """
    hidden, weight, bias, labels, ignore_index, logit_scale, softcap = inputs
    n, d, v, _ = inputs.shape
    out = torch.empty(n, device=hidden.device, dtype=torch.float32)
    active = torch.empty(ceil_div(n, block_m), dtype=torch.int32, device=hidden.device) if block_m else None
    shapes = plan.label_constants()
    _label_logit_kernel[(ceil_div(n, shapes["BLOCK_R"]),)](
        hidden, weight, bias, labels, order, out, active, tokens, moved, n, v, d, hidden.stride(0), weight.stride(0),
        ignore_index, logit_scale, softcap or 1.0, HAS_BIAS=bias is not None, HAS_SOFTCAP=softcap > 0,
        GATHER=order is not None, MOVE=moved is not None, BLOCK_M=block_m, **shapes,
    )  # fmt: skip
    return out, active


def exp_to_dlogits_(
    values: Tensor,  # [N, width], in place
    label_logit: Tensor,  # [N]
    inputs: LogitInputs,
    grads: TokenGrads,
    block_m: int,
    first_col: int = 0,
) -> Tensor:
    """Turn cached values into the gradient of the logits. Returns the row blocks [⌈N / block_m⌉] to compute anew.

    ``first_col``: of the vocabulary, the first of ``values``.
    """
    n, width = values.shape
    flags = torch.empty(ceil_div(n, block_m), dtype=torch.int32, device=values.device)
    _settle_kernel[(ceil_div(n, 4), ceil_div(width, 2048))](
        values, label_logit, inputs.labels, grads.lse, grads.grad_lse, grads.grad_label, flags, n, first_col, values.stride(0),
        inputs.ignore_index, inputs.logit_scale, inputs.softcap or 1.0,
        HAS_SOFTCAP=inputs.softcap > 0, BLOCK_M=block_m, BLOCK_R=4, BLOCK=2048, num_warps=8,
    )  # fmt: skip
    return flags
