"""Cache of exponentials of logits, as large as the memory budget allows, which saves recomputing the logits in backward.

For a logit z, the cache holds exp(z − z_label), times (1 − (z/softcap)²) with a softcap. Computing it needs no logsumexp. To get
the gradient of the logit, multiply by one factor per token; only the label's entry is computed separately. The values fit
bfloat16's range while the token's loss is below LOSS_LIMIT. Row blocks with a token above it are recomputed in the backward pass.

This module caches the first columns for all tokens, in the buffer of dW and in scratch memory. If that is faster, all columns are
cached in scratch memory for hf_cce.kernels.exp_products, or, in hf_cce.kernels.token_groups, for one group of tokens at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.forward import combine, tile_stats
from hf_cce.kernels.inputs import GradInputs, LogitInputs, Shape, TileStats
from hf_cce.kernels.labels import LabelLogits
from hf_cce.kernels.launch_config import Plan, ceil_div, empty_slab, padded
from hf_cce.kernels.launcher import Kernel
from hf_cce.kernels.tiles import exp, softcap_slope
from hf_cce.matmul import ALIGNED

LOSS_LIMIT = tl.constexpr(60.0)  # nats; exp(LOSS_LIMIT) and exp(-LOSS_LIMIT) are well within bfloat16's range
MAX_DW_SLABS = 4  # with more slabs, the dW buffer has room for more columns, but dh is a sum of more products


class Slab(NamedTuple):
    """Columns ``start`` to ``stop`` of the vocabulary, and the buffer of their exponentials or gradients."""

    start: int
    stop: int
    values: Tensor  # [N, at least stop − start]


class ExpCache(NamedTuple):
    """Exponentials saved by the forward pass. The backward pass reuses the buffer of the last slab for the columns after it."""

    slabs: list[Slab]  # consecutive columns, starting at the first
    label: LabelLogits
    grad_weight: Tensor | None = None  # [V, D], the dW buffer if it holds all slabs but the last; dW is not written yet


class CachePlan(NamedTuple):
    """Numbers of columns to cache: the first ones in the dW buffer, the ones after them in scratch memory."""

    in_dw: int  # in ``_dw_slabs`` slabs of equal width
    in_scratch: int


class Factors(NamedTuple):
    """The gradient of the logits of a token is ``scale`` times its exponentials, except at the label."""

    scale: Tensor  # [N], f in the kernels
    label_entry: Tensor  # [N], c in the kernels: the gradient of the label's logit
    flags: Tensor  # [row blocks] int32: a row block with a nonzero flag must be recomputed


@Kernel
@triton.jit(do_not_specialize=["num_tokens", "ignore_index"])
def _factors_kernel(
    values,  # None, or exponentials of all columns, rows `stride` apart; zeros are written at the labels
    label_logit,  # [N]
    labels,  # [N]
    lse,  # [N]
    grad_lse,  # [N]
    grad_label,  # [N]
    flags,  # [row blocks] int32, written: 1 if the loss of any token of the block is above LOSS_LIMIT
    scale,  # [N], written
    label_entry,  # [N], written
    num_tokens,
    vocab_size,
    stride,
    ignore_index,
    logit_scale,
    softcap,
    BLOCK_M: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = rows < num_tokens
    row_lse = tl.load(lse + rows, mask=in_rows, other=0.0)
    z = tl.load(label_logit + rows, mask=in_rows, other=0.0)
    label = tl.load(labels + rows, mask=in_rows, other=ignore_index)
    valid = (label != ignore_index) & (label >= 0) & (label < vocab_size)
    over_limit = tl.max((in_rows & ((row_lse - z <= LOSS_LIMIT) == 0)).to(tl.int32), 0)  # true for NaN
    p = exp(z - row_lse)
    # Upstream gradients of ignored tokens may be infinite, so they are not loaded.
    g = tl.load(grad_lse + rows, mask=valid, other=0.0)
    c = g * p + tl.load(grad_label + rows, mask=valid, other=0.0)
    if softcap is not None:
        c *= softcap_slope(z, softcap)
    # A flagged row block is recomputed: its values become the gradient itself, including the label's entry.
    f = tl.where(over_limit != 0, 1.0, tl.where(valid, g * p * logit_scale, 0.0))
    c = tl.where((over_limit == 0) & valid, c * logit_scale, 0.0)
    if values is not None:
        zero = tl.zeros((BLOCK_M,), values.dtype.element_ty)
        tl.store(values + rows.to(tl.int64) * stride + label, zero, mask=valid)
    tl.store(flags + tl.program_id(0), over_limit)
    tl.store(scale + rows, f, mask=in_rows)
    tl.store(label_entry + rows, c, mask=in_rows)


@Kernel
@triton.jit(do_not_specialize=["num_tokens", "first_col"])
def _exp_to_dlogits_kernel(
    values,  # [N, width], modified in place
    scale,  # [N]
    label_entry,  # [N]
    labels,  # [N]
    num_tokens,
    first_col,  # vocabulary entry of the first column of values
    width,  # row stride of values, which includes padding
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_rows = rows < num_tokens
    f = tl.load(scale + rows, mask=in_rows, other=0.0)
    c = tl.load(label_entry + rows, mask=in_rows, other=0.0)
    label_col = tl.load(labels + rows, mask=in_rows, other=-1) - first_col
    at = rows.to(tl.int64)[:, None] * width + cols[None, :]
    mask = in_rows[:, None] & (cols < width)[None, :]
    x = tl.load(values + at, mask=mask, other=0.0).to(tl.float32) * f[:, None]
    x = tl.where(cols[None, :] == label_col[:, None], c[:, None], x)
    tl.store(values + at, x.to(values.dtype.element_ty), mask=mask)


def plan_cache(
    shape: Shape, num_tiles: int, block_n: int, dw_block_n: int, may_use_dw: bool, budget: int
) -> CachePlan | None:
    """Return how many columns to cache, or None if the budget does not have room for enough of them.

    Args:
        num_tiles: column blocks of the forward pass; their statistics also take memory.
        block_n: the number of columns in scratch memory is a multiple of this, or all of V.
        dw_block_n: the number of columns in the dW buffer is a multiple of this.
        may_use_dw: the dW buffer may hold the first columns, if that saves scratch memory.
    """
    width = _scratch_columns(shape, num_tiles, block_n, budget)
    if width and may_use_dw:
        in_dw = _dw_buffer_columns(shape, dw_block_n)
        in_scratch = _scratch_columns(shape._replace(v=shape.v - in_dw), num_tiles, block_n, budget, in_dw > 0)
        # With two slabs, dh is summed in float32, which takes as much memory as 2 · D columns.
        if in_scratch and (width < shape.v or in_dw > 2 * shape.d):
            return CachePlan(in_dw, in_scratch)
    return CachePlan(0, width) if width else None


def _scratch_columns(shape: Shape, num_tiles: int, block_n: int, budget: int, has_earlier_slab: bool = False) -> int:
    """Return how many columns to cache in scratch memory; 0 for none.

    ``has_earlier_slab``: other columns are cached in the dW buffer, so dh is a sum of products even if all remaining columns fit.
    """
    n, d, v, dtype = shape
    if dtype == torch.float16 or n == 0:  # the range of float16 is too small for the exponentials
        return 0
    element, accumulator = dtype.itemsize, 4 * n * d if dtype.itemsize < 4 else 0
    left = budget - 4 * padded(n) * num_tiles - 16 * n  # next to the statistics of tiles and of tokens
    if element * n * padded(v) + (accumulator if v % ALIGNED or has_earlier_slab else 0) <= left:
        return v
    if 2 * accumulator > budget:
        return 0
    # The backward pass computes the other columns in slabs of this width. Statistics of tiles, which only the forward pass has,
    # must not make them much narrower.
    widest = (budget - accumulator) // (element * n) // block_n * block_n
    width = min(widest, left // (element * n) // block_n * block_n)
    return min(width, v) if 4 * width >= 3 * widest else 0


def _dw_slabs(shape: Shape) -> int:
    """Return the number of slabs in the dW buffer, measured on an H200. If d is much smaller than n, more slabs save little."""
    return min(max(6 * shape.d // shape.n, 1), MAX_DW_SLABS)


def _dw_buffer_columns(shape: Shape, block_n: int) -> int:
    """Return how many columns fit in the dW buffer, so that the dW rows of each slab fit before its exponentials."""
    (n, d, v, _), slabs = shape, _dw_slabs(shape)
    # Exponentials of all slabs and one slab's rows or, if the rows are larger, all rows and one slab's exponentials
    return max((d * v - 16) // (max(n, d) * slabs + min(n, d)), 0) // block_n * block_n * slabs


def allocate_cache(inputs: LogitInputs, plan: CachePlan, label: LabelLogits) -> ExpCache:
    """Allocate the buffers of the cache."""
    (n, d, v, _), in_dw = inputs.shape, plan.in_dw
    scratch = Slab(in_dw, min(v, in_dw + plan.in_scratch), empty_slab(inputs.hidden, n, plan.in_scratch))
    if not in_dw:
        return ExpCache([scratch], label)
    grad_weight = inputs.weight.new_empty((v, d))
    # At the end of the buffer: each slab's rows of dW are written from its beginning while the exponentials are still read.
    start, width = (v * d - n * in_dw) // 16 * 16, in_dw // _dw_slabs(inputs.shape)
    values = grad_weight.view(-1)[start : start + n * in_dw].view(-1, n, width)
    slabs = [Slab(i * width, (i + 1) * width, slab) for i, slab in enumerate(values)]
    return ExpCache([*slabs, scratch], label, grad_weight)


def fill_cache(
    inputs: LogitInputs,
    slabs: Sequence[Slab],  # their values are written
    label: LabelLogits,
    lse: Tensor,  # [N], written
    plan: Plan,
) -> None:
    """Compute the exponentials to cache, and the logsumexp of each token over the whole vocabulary."""
    n, _, v, _ = inputs.shape
    tile_lse = torch.empty((ceil_div(v, plan.block_n), padded(n)), device=lse.device, dtype=torch.float32)
    # The logits of columns that are not cached are computed with the slab before them.
    stops = [*(slab.start for slab in slabs[1:]), v]
    for slab, stop in zip(slabs, stops, strict=True):
        slab_tiles = TileStats(tile_lse[slab.start // plan.block_n :])
        tile_stats(inputs.columns(slab.start, stop), slab_tiles, label, plan, slab.start, slab.values)
    combine(TileStats(tile_lse), inputs, label.logit, lse)


def exp_factors(
    label_logit: Tensor,  # [N]
    inputs: LogitInputs,
    grads: GradInputs,
    block_m: int,
    values: Tensor | None = None,  # if given, the exponentials of all columns; zeros are written at the labels
) -> Factors:
    """Compute the factors of the exponentials; row blocks with a flag get f = 1 and c = 0."""
    n, _, v, _ = inputs.shape
    scale, label_entry = empty_slab(label_logit, 2, n).unbind()
    flags = torch.empty(ceil_div(n, block_m), dtype=torch.int32, device=label_logit.device)
    _factors_kernel[(ceil_div(n, block_m),)](
        values, label_logit, inputs.labels, grads.lse, *grads.upstream[:2], flags, scale, label_entry, n, v,
        0 if values is None else values.stride(0), inputs.ignore_index, inputs.logit_scale, inputs.softcap or None,
        BLOCK_M=block_m,
    )  # fmt: skip
    return Factors(scale, label_entry, flags)


def exp_to_dlogits_(slab: Slab, factors: Factors, labels: Tensor) -> Tensor:
    """Turn the cached exponentials of a slab into the gradient of the logits, in place; return ``factors.flags``."""
    n, width = slab.values.shape
    _exp_to_dlogits_kernel[(ceil_div(n, 4), ceil_div(width, 2048))](
        slab.values, factors.scale, factors.label_entry, labels, n, slab.start, slab.values.stride(0),
        BLOCK_R=4, BLOCK=2048, num_warps=8,
    )  # fmt: skip
    return factors.flags
