"""The strategies of a scalar loss on the kernels, from plain recomputation to the gradient filter: one function each.

Each makes the loss from the statistics of tokens, and says what its backward pass needs. Which one runs is decided by the caller;
None from one of them means that the memory budget has no room for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels import materialized
from hf_cce.kernels.exp_cache import CachePlan, ExpCache, Slab, allocate_cache, plan_cache
from hf_cce.kernels.forward import combine, logit_stats, tile_stats
from hf_cce.kernels.inputs import LogitInputs, TileStats, TokenGrads
from hf_cce.kernels.labels import LabelLogits, label_logits
from hf_cce.kernels.launch_config import Plan, ceil_div, empty_slab, make_plan, padded, specialised
from hf_cce.kernels.token_groups import PrecomputedGrads, group_gradient, group_size


@triton.jit(do_not_specialize=["num_tokens"])
def _total_loss_kernel(
    lse,  # [N], zero where the label is ignored, like all that follow
    label_logit,  # [N]
    mean_logit,  # [N], if SMOOTH
    factor,  # scalar
    loss,  # scalar
    num_tokens,
    label_smoothing,
    z_loss,
    SMOOTH: tl.constexpr,
    Z_LOSS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, num_tokens, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = at < num_tokens
        row_lse = tl.load(lse + at, mask=mask, other=0.0)
        z = tl.load(label_logit + at, mask=mask, other=0.0)
        row = row_lse - z
        if SMOOTH:
            row += label_smoothing * (z - tl.load(mean_logit + at, mask=mask, other=0.0))
        if Z_LOSS:
            row += z_loss * row_lse * row_lse
        total += row
    tl.store(loss, tl.sum(total) * tl.load(factor))


@triton.jit(do_not_specialize=["num_tokens"])
def _token_gradients_kernel(
    grad,  # scalar
    factor,  # scalar
    lse,  # [N]
    grad_lse,  # [N]
    grad_label,  # [N]
    grad_mean,  # [N], if SMOOTH
    num_tokens,
    label_smoothing,
    z_loss,
    SMOOTH: tl.constexpr,
    Z_LOSS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_tokens
    g = tl.load(grad).to(tl.float32) * tl.load(factor) + tl.zeros((BLOCK,), tl.float32)
    of_lse = g
    if Z_LOSS:
        of_lse = g * (1.0 + 2.0 * z_loss * tl.load(lse + at, mask=mask, other=0.0))
    tl.store(grad_lse + at, of_lse, mask=mask)
    tl.store(grad_label + at, g * (label_smoothing - 1.0), mask=mask)
    if SMOOTH:
        tl.store(grad_mean + at, -g * label_smoothing, mask=mask)


def token_gradients(
    grad: Tensor, factor: Tensor, lse: Tensor, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As ``hf_cce.reference.token_gradients``, in one launch."""
    n, smooth = lse.numel(), label_smoothing > 0
    vectors = empty_slab(lse, 3 if smooth else 2, n)
    grad_lse, grad_label, grad_mean = vectors[0], vectors[1], vectors[2] if smooth else None
    if n:
        _token_gradients_kernel[(ceil_div(n, 1024),)](
            grad, factor, lse, grad_lse, grad_label, grad_mean, n, label_smoothing, z_loss,
            SMOOTH=smooth, Z_LOSS=z_loss > 0, BLOCK=1024,
        )  # fmt: skip
    return grad_lse, grad_label, grad_mean


def total_loss(
    lse: Tensor, label_logit: Tensor, mean_logit: Tensor | None, factor: Tensor, label_smoothing: float, z_loss: float
) -> Tensor:
    loss = torch.empty((), dtype=torch.float32, device=lse.device)
    _total_loss_kernel[(1,)](
        lse, label_logit, mean_logit, factor, loss, lse.numel(), label_smoothing, z_loss,
        SMOOTH=label_smoothing > 0, Z_LOSS=z_loss > 0, BLOCK=4096, num_warps=8,
    )  # fmt: skip
    return loss


def cross_entropy(
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    bias: Tensor | None,  # [V]
    labels: Tensor,  # [N]
    factor: Tensor,  # scalar
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    memory_budget: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As ``hf_cce.reference.cross_entropy``, keeping nothing: the backward pass recomputes all logits."""
    lse, label_logit, mean_logit, *_ = logit_stats(
        hidden, weight, bias, labels, ignore_index, logit_scale, softcap, label_smoothing > 0, False, False, False,
        memory_budget,
    )  # fmt: skip
    loss = total_loss(lse, label_logit, mean_logit, factor, label_smoothing, z_loss)
    return loss, lse, hidden.new_empty(0), hidden.new_empty(0), hidden.new_empty(0)


def _stats_and_cache(
    inputs: LogitInputs,
    slabs: Sequence[Slab],  # whose values are written
    label: LabelLogits,
    lse: Tensor,  # [N], written
    plan: Plan,
) -> None:
    """Compute the logsumexp of each token, and the exponentials to keep."""
    n, _, v, _ = inputs.shape
    num_tiles, stride = ceil_div(v, plan.block_n), padded(n)
    tile_lse = torch.empty(num_tiles * stride, device=lse.device, dtype=torch.float32)
    ends = [*(slab.start for slab in slabs[1:]), v]
    for slab, end in zip(slabs, ends, strict=True):
        of_slab = TileStats(tile_lse[slab.start // plan.block_n * stride :])
        tile_stats(inputs.columns(slab.start, end), of_slab, label, plan, slab.start, slab.values)
    combine(TileStats(tile_lse), label.logit, inputs.labels, lse, [None] * 4, v, num_tiles, inputs.ignore_index)


def _cache_plan(inputs: LogitInputs, need_weight: bool, budget: int) -> CachePlan | None:
    plan, later = (make_plan(inputs.hidden, inputs.weight, backward) for backward in (False, True))
    block_n = max(plan.block_n, later.block_n)
    dw_block_n = block_n * (2 if specialised(plan, inputs.bias, inputs.softcap) else 1)  # a multiple of every kernel's
    num_tiles = ceil_div(inputs.shape.v, plan.block_n)
    return plan_cache(inputs.shape, num_tiles, block_n, dw_block_n, need_weight, budget)


def stored_cross_entropy(
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    bias: Tensor | None,  # [V]
    labels: Tensor,  # [N]
    factor: Tensor,  # scalar
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    z_loss: float,
    in_dw_buffer: bool,
    memory_budget: int,
) -> tuple[Tensor, Tensor, ExpCache] | None:
    """(loss, lse [N], the exponentials kept for ``logit_stats_backward``), or None where the budget has no room for any.

    With ``in_dw_buffer`` the weight's gradient is allocated here, and its memory used until it is written.
    """
    inputs = LogitInputs(hidden, weight, bias, labels, ignore_index, logit_scale, softcap).readable()
    columns = _cache_plan(inputs, in_dw_buffer, memory_budget)
    if columns is None:
        return None
    plan = make_plan(inputs.hidden, inputs.weight)
    block_m = plan.block_m if specialised(plan, bias, softcap) else 0
    cache = allocate_cache(inputs, columns, label_logits(inputs, plan, block_m))
    lse = torch.empty_like(cache.label.logit)
    _stats_and_cache(inputs, cache.slabs, cache.label, lse, plan)
    return total_loss(lse, cache.label.logit, None, factor, 0.0, z_loss), lse, cache


def grouped_cross_entropy(
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    bias: Tensor | None,  # [V]
    labels: Tensor,  # [N]
    factor: Tensor,  # scalar
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    z_loss: float,
    need_hidden: bool,
    need_weight: bool,
    memory_budget: int,
) -> tuple[Tensor, Tensor, PrecomputedGrads] | None:
    """(loss, lse [N], the gradient of the hidden states but for a factor), or None where the weight needs a gradient, too.

    Likewise where the budget has no room for groups of tokens that pay.
    """
    if need_weight or not need_hidden:
        return None
    inputs = LogitInputs(hidden, weight, bias, labels, ignore_index, logit_scale, softcap).readable()
    n, _, v, _ = inputs.shape
    plan, later = (make_plan(inputs.hidden, inputs.weight, backward) for backward in (False, True))
    size = group_size(inputs.shape, ceil_div(v, plan.block_n), max(plan.block_m, later.block_m), memory_budget)
    if size == 0:
        return None
    label = label_logits(inputs, plan, plan.block_m if specialised(plan, bias, softcap) else 0)
    lse, one = torch.empty_like(label.logit), torch.ones((), device=hidden.device, dtype=torch.float32)
    grad_hidden = torch.empty_like(inputs.hidden, memory_format=torch.contiguous_format)
    values = empty_slab(inputs.hidden, min(n, size), v)  # of one group after the other
    for start in range(0, n, size):
        rows = slice(start, min(n, start + size))
        group, of_group = inputs.tokens(rows), label.tokens(rows, plan.block_m)
        slab = Slab(0, v, values[: group.shape.n])
        _stats_and_cache(group, [slab], of_group, lse[rows], plan)
        grad_lse, grad_label, _ = token_gradients(one, factor, lse[rows], 0.0, z_loss)
        grads = TokenGrads(lse[rows], grad_lse, grad_label)
        group_gradient(group, slab.values, of_group.logit, grads, later, grad_hidden[rows])
    return total_loss(lse, label.logit, None, factor, 0.0, z_loss), lse, PrecomputedGrads(grad_hidden)


def dense_cross_entropy(
    logits: Tensor,  # [N, V], of ``materialized.logits_of``; used up by ``dense_gradients``
    bias: Tensor | None,  # [V]
    labels: Tensor,  # [N]
    factor: Tensor,  # scalar
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    z_loss: float,
) -> tuple[Tensor, Tensor, materialized.Materialized]:
    """(loss, lse [N], what ``dense_gradients`` needs): for few tokens, with real logits."""
    bias, labels = None if bias is None else bias.contiguous(), labels.contiguous()
    saved, label_logit = materialized.forward(logits, bias, labels, ignore_index, logit_scale, softcap)
    return total_loss(saved.lse, label_logit, None, factor, 0.0, z_loss), saved.lse, saved
