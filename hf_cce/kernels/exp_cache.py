"""Cache of exponentials of logits, as large as the memory budget allows, which saves recomputing the logits in backward.

For a logit z, the cache holds exp(z − z_label), times (1 − (z/softcap)²) with a softcap. Computing it needs no logsumexp. To get
the gradient of the logit, multiply by one factor per token; only the label's entry is computed separately. The values fit
bfloat16's range while the token's loss is below LOSS_LIMIT. Row blocks with a token above it are recomputed in the backward pass.

This module caches the first columns for all tokens. If those are all columns, hf_cce.kernels.exp_products computes the gradients
from them. hf_cce.kernels.token_groups stores all columns for one group of tokens at a time instead, if that is faster.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.inputs import GradInputs, LogitInputs, Shape
from hf_cce.kernels.labels import LabelLogits
from hf_cce.kernels.launch_config import ceil_div, empty_slab, padded
from hf_cce.kernels.launcher import Kernel
from hf_cce.kernels.matmul import ALIGNED
from hf_cce.kernels.tiles import softcap_slope

LOSS_LIMIT = tl.constexpr(60.0)  # nats; exp(LOSS_LIMIT) and exp(-LOSS_LIMIT) are well within bfloat16's range


class Slab(NamedTuple):
    """Columns ``start`` to ``stop`` of the vocabulary, and the buffer of their exponentials or gradients."""

    start: int
    stop: int
    values: Tensor  # [N, at least stop − start]


class ExpCache(NamedTuple):
    """Exponentials saved by the forward pass. The backward pass reuses the buffer of the last slab for the columns after it."""

    slabs: list[Slab]  # consecutive columns, starting at the first
    label: LabelLogits
    grad_weight: Tensor | None = None  # [V, D], the dW buffer if it holds the first slab; dW itself is not written yet


class CachePlan(NamedTuple):
    """Numbers of columns to cache: the first ones in the dW buffer, the ones after them in scratch memory."""

    in_dw_buffer: int
    in_scratch: int


@Kernel
@triton.jit(do_not_specialize=["num_tokens", "first_col", "ignore_index"])
def _exp_to_dlogits_kernel(
    values,  # [N, width], modified in place
    label_logit,  # [N]
    labels,  # [N]
    lse,  # [N]
    grad_lse,  # [N]
    grad_label,  # [N]
    flags,  # [row blocks] int32, written: 1 if the loss of any token of the block is above LOSS_LIMIT
    num_tokens,
    first_col,  # vocabulary entry of the first column of values
    width,  # row stride of values, which includes padding
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
    # Upstream gradients of ignored tokens may be infinite, so they are not loaded.
    g = tl.load(grad_lse + rows, mask=label != ignore_index, other=0.0)
    label_entry = g * p_label + tl.load(grad_label + rows, mask=label != ignore_index, other=0.0)
    if HAS_SOFTCAP:
        label_entry *= softcap_slope(at_label, softcap)
    at = rows.to(tl.int64)[:, None] * width + cols[None, :]
    mask = in_rows[:, None] & (cols < width)[None, :]
    x = tl.load(values + at, mask=mask, other=0.0).to(tl.float32) * (g * p_label * logit_scale)[:, None]
    x = tl.where(cols[None, :] == (label - first_col)[:, None], (label_entry * logit_scale)[:, None], x)
    tl.store(values + at, x.to(values.dtype.element_ty), mask=mask)
    if tl.program_id(1) == 0 and tl.program_id(0) * BLOCK_R % BLOCK_M == 0:
        block = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_M)
        inside = block < num_tokens
        loss = tl.load(lse + block, mask=inside, other=0.0) - tl.load(label_logit + block, mask=inside, other=0.0)
        over_limit = inside & ((loss <= LOSS_LIMIT) == 0)  # true for NaN
        tl.store(flags + tl.program_id(0) * BLOCK_R // BLOCK_M, tl.max(over_limit.to(tl.int32), 0))


def plan_cache(
    shape: Shape, num_tiles: int, block_n: int, dw_block_n: int, need_weight: bool, budget: int
) -> CachePlan | None:
    """Return how many columns to cache, or None if the budget does not have room for enough of them.

    Args:
        num_tiles: column blocks of the forward pass; their statistics also take memory.
        block_n: the number of columns in scratch memory is a multiple of this, or all of V.
        dw_block_n: the number of columns in the dW buffer is a multiple of this.
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


def _scratch_columns(shape: Shape, num_tiles: int, block_n: int, budget: int, has_earlier_slab: bool = False) -> int:
    """Return how many columns to cache in scratch memory; 0 for none.

    ``has_earlier_slab``: other columns are cached in the dW buffer, so dh is a sum of products even if all remaining columns fit.
    """
    n, d, v, dtype = shape
    if dtype == torch.float16 or n == 0:  # the range of float16 is too small for the exponentials
        return 0
    element = dtype.itemsize
    left = budget - 4 * padded(n) * num_tiles - 8 * n
    accumulator = 4 * n * d if element < 4 else 0
    if element * n * padded(v) + (accumulator if v % ALIGNED or has_earlier_slab else 0) <= left:
        return v
    if 2 * accumulator > budget:
        return 0
    # Later slabs have the width of the cached one. Do not cache if tile statistics leave so little room that all would be narrow.
    width, later_width = (
        x // (element * n) // block_n * block_n for x in (min(left, budget - accumulator), budget - accumulator)
    )
    return min(width, v) if 4 * width >= 3 * later_width else 0


def _dw_buffer_columns(shape: Shape, block_n: int) -> int:
    """Return how many columns fit in the dW buffer next to the dW rows of the same columns."""
    n, d, v, _ = shape
    return max((d * v - 16) // (d + n), 0) // block_n * block_n


def allocate_cache(inputs: LogitInputs, plan: CachePlan, label: LabelLogits) -> ExpCache:
    """Allocate the buffers of the cache; ``tile_stats`` fills them."""
    n, d, v, _ = inputs.shape
    first = plan.in_dw_buffer
    rest = Slab(first, min(v, first + plan.in_scratch), empty_slab(inputs.hidden, n, plan.in_scratch))
    if not first:
        return ExpCache([rest], label)
    grad_weight = inputs.weight.new_empty((v, d))
    # At the end of the buffer: the dW rows of these columns are written to its beginning while the cached values are still read.
    start = (v * d - n * first) // 16 * 16
    in_dw_buffer = grad_weight.view(-1)[start : start + n * first].view(n, first)
    return ExpCache([Slab(0, first, in_dw_buffer), rest], label, grad_weight)


def exp_to_dlogits_(
    slab: Slab,
    label_logit: Tensor,  # [N]
    inputs: LogitInputs,
    grads: GradInputs,
    block_m: int,
) -> Tensor:
    """Turn the cached exponentials of a slab into the gradient of the logits, in place.

    Returns:
        Flags of the row blocks, [⌈N / block_m⌉] int32. Row blocks with a nonzero flag must be recomputed.
    """
    values, (n, width) = slab.values, slab.values.shape
    flags = torch.empty(ceil_div(n, block_m), dtype=torch.int32, device=values.device)
    _exp_to_dlogits_kernel[(ceil_div(n, 4), ceil_div(width, 2048))](
        values, label_logit, inputs.labels, grads.lse, grads.grad_lse, grads.grad_label, flags, n, slab.start, values.stride(0),
        inputs.ignore_index, inputs.logit_scale, inputs.softcap or 1.0,
        HAS_SOFTCAP=inputs.softcap > 0, BLOCK_M=block_m, BLOCK_R=4, BLOCK=2048, num_warps=8,
    )  # fmt: skip
    return flags
