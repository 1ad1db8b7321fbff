"""Backward: for one slab of the vocabulary at a time, recompute its logits, write the gradient of the logits, and multiply.

Each slab's rows of the weight gradient are written once, from float32 accumulators; the gradient of the hidden states is
accumulated over slabs in float32. No atomics, so results repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.plan import Plan, ceil_div, empty_slab, make_plan, operand, row_major, slab_width, specialised
from hf_cce.kernels.products import ALIGNED, multiply_add
from hf_cce.kernels.stored import Stored, label_logits, settle
from hf_cce.kernels.tiles import tile_gradient, tile_logits, tile_position


# The arguments of _gradient_tile are those of the kernel below.
@triton.jit
def _gradient_tile(
    row_block,
    col_block,
    hidden,
    weight,
    bias,
    labels,
    lse,
    entropy,
    grad_lse,
    grad_label,
    grad_mean,
    grad_entropy,
    out,
    slab_start,
    slab_width,
    out_stride,
    num_tokens,
    vocab_size,
    hidden_size,
    hidden_stride,
    weight_stride,
    ignore_index,
    logit_scale,
    softcap,
    HAS_MEAN: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row, col = row_block * BLOCK_M, slab_start + col_block * BLOCK_N
    rows = row + tl.arange(0, BLOCK_M)
    cols = col + tl.arange(0, BLOCK_N)
    in_rows = rows < num_tokens
    # Counted from the start of the slab, Triton can tell that they are aligned, and stores vectors.
    place = col_block * BLOCK_N + tl.arange(0, BLOCK_N)
    label = tl.load(labels + rows, mask=in_rows, other=ignore_index)
    valid = label != ignore_index
    # Tiles of ignored tokens alone multiply nothing.
    depth = tl.where(tl.sum(valid.to(tl.int32)) > 0, hidden_size, 0)
    # Loaded before the products, which hide how long that takes.
    row_lse = tl.where(valid, tl.load(lse + rows, mask=in_rows, other=0.0), float("inf"))
    g = tl.where(valid, tl.load(grad_lse + rows, mask=in_rows, other=0.0), 0.0)
    z = tile_logits(
        hidden, weight, bias, None, row, col, num_tokens, vocab_size, depth, hidden_stride, weight_stride,
        logit_scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, TMA, False, PRECISION, UPCAST, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    gradient = tile_gradient(
        z, rows, cols, in_rows, col, label, valid, row_lse, g, entropy, grad_label, grad_mean, grad_entropy,
        vocab_size, logit_scale, softcap, HAS_MEAN, HAS_ENTROPY, HAS_SCALE, HAS_SOFTCAP, BLOCK_N,
    )  # fmt: skip
    at = out + row.to(tl.int64) * out_stride
    here = tl.arange(0, BLOCK_M)[:, None] * out_stride + place[None, :]
    tl.store(at + here, gradient.to(out.dtype.element_ty), mask=in_rows[:, None] & (place < slab_width)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "slab_start", "ignore_index"])
def _logit_gradient_kernel(
    hidden,  # [N, D]
    weight,  # [V, D]
    bias,  # [V]
    labels,  # [N] int64
    lse,  # [N]
    entropy,  # [N]
    grad_lse,  # [N]
    grad_label,  # [N]
    grad_mean,  # [N]
    grad_entropy,  # [N]
    flags,  # [row blocks], if FLAGGED: only these row blocks are computed
    out,  # [N, width], the gradient of the logits before scale and softcap
    slab_start,
    slab_width,
    out_stride,
    num_tokens,
    vocab_size,
    hidden_size,
    hidden_stride,
    weight_stride,
    ignore_index,
    logit_scale,
    softcap,
    FLAGGED: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    num_row_blocks, num_col_blocks = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(slab_width, BLOCK_N)
    if FLAGGED:
        # Hardly ever anything to do: few programs, which find that out at little cost.
        row_block = tl.program_id(0)
        if tl.load(flags + row_block) != 0:
            for col_block in range(tl.program_id(1), num_col_blocks, tl.num_programs(1)):
                _gradient_tile(
                    row_block, col_block,
                    hidden, weight, bias, labels, lse, entropy, grad_lse, grad_label, grad_mean, grad_entropy, out, slab_start,
                    slab_width, out_stride, num_tokens, vocab_size, hidden_size, hidden_stride, weight_stride, ignore_index,
                    logit_scale, softcap, HAS_MEAN, HAS_ENTROPY, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, TMA, PRECISION, UPCAST,
                    BLOCK_M, BLOCK_N, BLOCK_K,
                )  # fmt: skip
    else:
        row_block, col_block = tile_position(tl.program_id(0), num_row_blocks, num_col_blocks, GROUP_M)
        _gradient_tile(
            row_block, col_block,
            hidden, weight, bias, labels, lse, entropy, grad_lse, grad_label, grad_mean, grad_entropy, out, slab_start,
            slab_width, out_stride, num_tokens, vocab_size, hidden_size, hidden_stride, weight_stride, ignore_index,
            logit_scale, softcap, HAS_MEAN, HAS_ENTROPY, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, TMA, PRECISION, UPCAST, BLOCK_M,
            BLOCK_N, BLOCK_K,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "slab_start", "ignore_index"])
def _label_entries_kernel(
    labels,  # [N]
    lse,  # [N]
    grad_lse,  # [N]
    grad_label,  # [N]
    label_logit,  # [N]
    out,  # [N, width], written at the labels that lie in the slab
    slab_start,
    slab_width,
    out_stride,
    num_tokens,
    ignore_index,
    logit_scale,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_rows = rows < num_tokens
    label = tl.load(labels + rows, mask=in_rows, other=ignore_index)
    column = label - slab_start
    hit = in_rows & (label != ignore_index) & (column >= 0) & (column < slab_width)
    p = tl.exp(tl.load(label_logit + rows, mask=hit, other=0.0) - tl.load(lse + rows, mask=hit, other=0.0))
    gradient = p * tl.load(grad_lse + rows, mask=hit, other=0.0) + tl.load(grad_label + rows, mask=hit, other=0.0)
    at = out + rows.to(tl.int64) * out_stride + column
    tl.store(at, (gradient * logit_scale).to(out.dtype.element_ty), mask=hit)


class OfLabels(NamedTuple):
    """What hf_cce.kernels.hopper wants to know of the labels: see ``label_logits``."""

    logit: Tensor  # [N]
    live: Tensor  # [row blocks]

    def rows(self, rows: slice, block_m: int) -> OfLabels:
        """Of the tokens ``rows``, which begin with a row block."""
        return OfLabels(self.logit[rows], self.live[(rows.start or 0) // block_m :])


def write_logit_gradient(
    out: Tensor,  # [N, width], written
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    bias: Tensor | None,
    vectors: Sequence[Tensor | None],  # labels, lse, entropy, grad_lse, grad_label, grad_mean, grad_entropy: [N] each
    start: int,
    stop: int,
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    plan: Plan,
    flags: Tensor | None = None,
    of_labels: OfLabels | None = None,
) -> None:
    """The gradient of the logits of the vocabulary from ``start`` to ``stop``; of flagged row blocks alone with ``flags``.

    With ``of_labels``, and without flags, hf_cce.kernels.hopper does it.
    """
    (n, d), v = hidden.shape, weight.shape[0]
    if of_labels is not None and flags is None:
        from hf_cce.kernels import hopper

        labels, lse, _, grad_lse, grad_label, *_ = vectors
        assert labels is not None and lse is not None and grad_lse is not None
        hopper.write_logit_gradient(
            out, hidden, weight, labels, of_labels.live, lse, grad_lse, start, stop, ignore_index, logit_scale
        )
        _label_entries_kernel[(ceil_div(n, 256),)](
            labels, lse, grad_lse, grad_label, of_labels.logit, out, start, stop - start, out.stride(0), n, ignore_index,
            logit_scale, BLOCK=256, num_warps=4,
        )  # fmt: skip
        return
    rows, cols = ceil_div(n, plan.block_m), ceil_div(stop - start, plan.block_n)
    _logit_gradient_kernel[(rows * cols,) if flags is None else (rows, min(cols, 16))](
        operand(hidden, plan.block_m, plan), operand(weight, plan.block_n, plan), bias, *vectors, flags, out,
        start, stop - start, out.stride(0), n, v, d, hidden.stride(0), weight.stride(0), ignore_index, logit_scale,
        softcap or 1.0, FLAGGED=flags is not None, HAS_MEAN=vectors[5] is not None, HAS_ENTROPY=vectors[6] is not None,
        HAS_BIAS=bias is not None, HAS_SCALE=logit_scale != 1.0, HAS_SOFTCAP=softcap > 0, **plan.constants(),
    )  # fmt: skip


def logit_stats_backward(
    grad_lse: Tensor,  # [N]
    grad_label: Tensor,  # [N]
    grad_mean: Tensor | None,
    grad_entropy: Tensor | None,
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    bias: Tensor | None,  # [V]
    labels: Tensor,  # [N]
    lse: Tensor,  # [N]
    entropy: Tensor | None,
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    memory_budget: int,
    stored: Stored | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients as ``hf_cce.portable.logit_stats_backward``.

    Scratch, within the budget: one slab [N, width] and, with more than one slab, the float32 accumulator of the hidden states'
    gradient [N, D]. Where that accumulator would take more than half of the budget, the two gradients are formed in two
    passes, the second over groups of tokens: a fifth GEMM, but no accumulator for all tokens. ``stored`` brings the first slab,
    and the memory for the others, and may bring one before it in the memory of the weight's gradient.
    """
    (n, d), v = hidden.shape, weight.shape[0]
    hidden, weight = row_major(hidden), row_major(weight)
    bias = None if bias is None else bias.contiguous()
    grad_hidden = hidden.new_empty((n, d) if need_hidden else 0)  # rows in one piece, whatever those of hidden overlap
    if stored is not None and stored.grad_weight is not None:
        grad_weight = stored.grad_weight
    else:
        grad_weight = weight.new_empty((v, d) if need_weight else 0)
    grad_bias = weight.new_empty(v if need_bias else 0)
    if n == 0:
        return grad_hidden, grad_weight.zero_(), grad_bias.zero_()
    plan = make_plan(hidden, weight, backward=True)
    labels, lse, grad_lse, grad_label = (x.contiguous() for x in (labels, lse, grad_lse, grad_label))
    vectors = (labels, lse, entropy, grad_lse, grad_label, grad_mean, grad_entropy)
    per_token = [None if x is None else x.contiguous() for x in vectors]
    settled = (labels, lse, grad_lse, grad_label)

    of_labels = None
    if specialised(plan, bias, softcap, grad_mean, grad_entropy):
        if stored is not None and stored.live is not None:
            of_labels = OfLabels(stored.label_logit, stored.live)
        else:
            logit, live = label_logits(
                hidden, weight, None, settled[0], ignore_index, logit_scale, softcap, plan, plan.block_m
            )
            of_labels = None if live is None else OfLabels(logit, live)

    def write_gradient(
        out: Tensor, rows: slice, vectors: Sequence[Tensor | None], start: int, stop: int, flags: Tensor | None
    ) -> None:
        labelled = None if of_labels is None else of_labels.rows(rows, plan.block_m)
        write_logit_gradient(
            out, hidden[rows], weight, bias, vectors, start, stop, ignore_index, logit_scale, softcap, plan, flags, labelled
        )  # fmt: skip

    def one_pass(rows: slice, for_hidden: bool, for_weight: bool) -> None:
        """Form gradients from the tokens ``rows``; that of the weight, and the bias, only over all of them."""
        h, vectors = hidden[rows], [None if x is None else x[rows] for x in per_token]
        size, narrow = h.shape[0], h.element_size() < 4
        if stored is None:
            width = slab_width(size, v, h.element_size(), plan.block_n, memory_budget)
            if (width < v or v % ALIGNED) and for_hidden and narrow:
                width = slab_width(size, v, h.element_size(), plan.block_n, memory_budget - 4 * size * d)
        else:
            width = stored.values.shape[1]
        several = width < v or v % ALIGNED > 0  # products, those of what was lent apart
        # In the result's own memory where its dtype is float32 or one product is all there is.
        total = torch.empty_like(h, dtype=torch.float32) if for_hidden and several and narrow else grad_hidden[rows]
        scratch = empty_slab(hidden, size, width) if stored is None else stored.values
        lent = None if stored is None else stored.lent
        first = 0 if lent is None else lent.shape[1]
        slabs = [(start, min(v, start + width), scratch) for start in range(first, v, width)]
        if lent is not None:  # whose memory the rows of all others are written to
            slabs.insert(0, (0, first, lent))
        for start, stop, slab in slabs:
            flags = None
            if stored is not None and start <= first:
                of_slab = stored._replace(values=slab)
                flags = settle(of_slab, *settled, ignore_index, logit_scale, softcap, plan.block_m, start)
            write_gradient(slab, rows, vectors, start, stop, flags)
            gradient = slab[:, : stop - start]  # [tokens, slab]
            if for_weight:
                if need_weight:
                    multiply_add(grad_weight[start:stop], gradient.t(), h, first=True)
                if need_bias:
                    grad_bias[start:stop] = gradient.sum(0, dtype=torch.float32)
            if for_hidden:
                multiply_add(total, gradient, weight[start:stop], first=start == 0)
        if for_hidden and total.dtype != hidden.dtype:
            grad_hidden[rows] = total

    everything = slice(0, n)
    one_slab = slab_width(n, v, hidden.element_size(), plan.block_n, memory_budget) == v
    if (
        stored is not None
        or not need_hidden
        or hidden.element_size() == 4
        or one_slab
        or 4 * n * d <= memory_budget // 2
    ):
        one_pass(everything, need_hidden, need_weight or need_bias)
    else:
        if need_weight or need_bias:
            one_pass(everything, False, True)
        groups = ceil_div(4 * n * d, memory_budget // 2)
        size = ceil_div(ceil_div(n, groups), plan.block_m) * plan.block_m
        for start in range(0, n, size):
            one_pass(slice(start, min(n, start + size)), True, False)
    return grad_hidden, grad_weight, grad_bias
