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

from hf_cce.kernels.plan import Plan, ceil_div, padded
from hf_cce.kernels.products import ALIGNED
from hf_cce.kernels.tiles import softcapped

LIMIT = tl.constexpr(60.0)  # nats; exp of it, and of minus it, is far from the ends of bfloat16


class Stored(NamedTuple):
    """What the forward pass leaves of the first slab."""

    values: Tensor  # [N, width], aligned: exp(z − z_label) · (1 − (z/softcap)²), zero where the label is ignored
    label_logit: Tensor  # [N]
    live: Tensor | None = None  # see label_logits
    lent: Tensor | None = None  # [N, ·]: likewise, of the columns before those of values
    grad_weight: Tensor | None = None  # [V, D], to be written: whose memory that is


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


def stored_width(
    n: int, d: int, v: int, dtype: torch.dtype, tile_rows: int, block_n: int, budget: int, after: bool = False
) -> int:
    """Columns of the first slab that the budget can hold from the forward pass to the backward pass; 0 for none.

    ``after``: there are others before, so that even with all of these the hidden states' gradient is a sum of products.
    """
    if dtype == torch.float16 or n == 0:  # float16 has no range for it
        return 0
    element = dtype.itemsize
    left = budget - 4 * n * tile_rows - 8 * n
    beside = 4 * n * d if element < 4 else 0
    if element * n * padded(v) + (beside if v % ALIGNED or after else 0) <= left:
        return v
    if 2 * beside > budget:
        return 0
    # The slabs that follow are as wide as this one: where the statistics leave it narrow, none of them gains.
    width, later = (x // (element * n) // block_n * block_n for x in (min(left, budget - beside), budget - beside))
    return width if 4 * width >= 3 * later else 0


def lent_columns(n: int, d: int, v: int, element: int, written: int, block_n: int) -> int:
    """Columns whose values of ``n`` tokens fit into the memory of a gradient [V, D] behind its rows of the same columns.

    ``element``: bytes of an entry of that gradient and of a value; ``written``: of an entry of the rows, which may be wider.
    """
    return max(element * (d * v - 16) // (written * d + element * n), 0) // block_n * block_n


def lent_values(grad_weight: Tensor, n: int, columns: int) -> Tensor:
    """[n, columns] at the end of the memory of ``grad_weight``."""
    start = (grad_weight.numel() - n * columns) // 16 * 16
    return grad_weight.view(-1)[start : start + n * columns].view(n, columns)


def label_logits(
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    bias: Tensor | None,
    labels: Tensor,  # [N]
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    plan: Plan,
    block_m: int = 0,
    order: Tensor | None = None,  # [V] int32: the row of weight of each label, where that is not the label itself
    tokens: Tensor | None = None,  # [N] int64: the row of hidden of each token, where that is not the token itself
    moved: Tensor | None = None,  # [N, D] contiguous, written: those rows in that order, which are read for it anyway
) -> tuple[Tensor, Tensor | None]:
    """The logit of each token's label, [N] float32, zero where it is ignored.

    With ``block_m`` also, for each of as many tokens, whether a label of them is not ignored: [⌈N / block_m⌉] int32, 0 or 1.
    """
    (n, d), v = hidden.shape, weight.shape[0]
    out = torch.empty(n, device=hidden.device, dtype=torch.float32)
    live = torch.empty(ceil_div(n, block_m), dtype=torch.int32, device=hidden.device) if block_m else None
    shapes = plan.label_constants()
    _label_logit_kernel[(ceil_div(n, shapes["BLOCK_R"]),)](
        hidden, weight, bias, labels, order, out, live, tokens, moved, n, v, d, hidden.stride(0), weight.stride(0), ignore_index,
        logit_scale, softcap or 1.0, HAS_BIAS=bias is not None, HAS_SOFTCAP=softcap > 0, GATHER=order is not None,
        MOVE=moved is not None, BLOCK_M=block_m, **shapes,
    )  # fmt: skip
    return out, live


def settle(
    stored: Stored,
    labels: Tensor,  # [N]
    lse: Tensor,  # [N]
    grad_lse: Tensor,  # [N]
    grad_label: Tensor,  # [N]
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    block_m: int,
    first_col: int = 0,
) -> Tensor:
    """Turn the stored slab into the gradient of the logits, in place. Returns the row blocks [⌈N / block_m⌉] to compute anew.

    ``first_col``: of the vocabulary, of the slab.
    """
    n, width = stored.values.shape
    flags = torch.empty(ceil_div(n, block_m), dtype=torch.int32, device=lse.device)
    _settle_kernel[(ceil_div(n, 4), ceil_div(width, 2048))](
        stored.values, stored.label_logit, labels, lse, grad_lse, grad_label, flags, n, first_col, stored.values.stride(0),
        ignore_index, logit_scale, softcap or 1.0,
        HAS_SOFTCAP=softcap > 0, BLOCK_M=block_m, BLOCK_R=4, BLOCK=2048, num_warps=8,
    )  # fmt: skip
    return flags
