"""The scalar loss without the gradient filter, from the statistics of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.exp_cache import ExpCache, Slab, allocate_cache, plan_cache
from hf_cce.kernels.exp_products import pays_and_fits
from hf_cce.kernels.forward import combine, logit_stats, tile_stats
from hf_cce.kernels.inputs import GradInputs, LogitInputs, TileStats
from hf_cce.kernels.labels import LabelLogits, label_logits
from hf_cce.kernels.launch_config import Plan, ceil_div, empty_slab, make_plan, padded, uses_hopper
from hf_cce.kernels.launcher import Kernel
from hf_cce.kernels.token_groups import PrecomputedGradients, group_gradients, group_size
from hf_cce.spec import Inputs, LossSpec, TokenGrads, WantedStats


@Kernel
@triton.jit(do_not_specialize=["num_tokens"])
def _total_loss_kernel(
    lse,  # [N], zero where the label is ignored
    label_logit,  # [N], likewise
    mean_logit,  # [N], likewise, or None: no label smoothing
    factor,  # scalar
    loss,  # scalar
    num_tokens,
    label_smoothing,
    z_loss,  # None: zero
    BLOCK: tl.constexpr,
):
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, num_tokens, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = at < num_tokens
        row_lse = tl.load(lse + at, mask=mask, other=0.0)
        z = tl.load(label_logit + at, mask=mask, other=0.0)
        row = row_lse - z
        if mean_logit is not None:
            row += label_smoothing * (z - tl.load(mean_logit + at, mask=mask, other=0.0))
        if z_loss is not None:
            row += z_loss * row_lse * row_lse
        total += row
    tl.store(loss, tl.sum(total) * tl.load(factor))


def total_loss(
    lse: Tensor, label_logit: Tensor, factor: Tensor, spec: LossSpec, mean_logit: Tensor | None = None
) -> Tensor:
    """Return the sum of the tokens' losses times ``factor``; ``mean_logit`` is only needed for label smoothing."""
    loss = torch.empty((), dtype=torch.float32, device=lse.device)
    _total_loss_kernel[(1,)](
        lse, label_logit, mean_logit if spec.label_smoothing else None, factor, loss, lse.numel(), spec.label_smoothing,
        spec.z_loss or None, BLOCK=4096, num_warps=8,
    )  # fmt: skip
    return loss


def cross_entropy(x: Inputs, spec: LossSpec, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return (loss, lse [N]) for a scalar ``factor``; nothing else is saved, so the backward pass recomputes all logits."""
    stats = logit_stats(x, spec, WantedStats(mean=spec.label_smoothing > 0))
    return total_loss(stats.lse, stats.label_logit, factor, spec, stats.mean_logit), stats.lse


def _compute_lse_and_cache(
    inputs: LogitInputs,
    slabs: Sequence[Slab],  # their values are written
    label: LabelLogits,
    lse: Tensor,  # [N], written
    plan: Plan,
) -> None:
    """Compute the logsumexp of each token, and the exponentials to cache."""
    n, _, v, _ = inputs.shape
    stride = padded(n)
    tile_lse = torch.empty(ceil_div(v, plan.block_n) * stride, device=lse.device, dtype=torch.float32)
    ends = [*(slab.start for slab in slabs[1:]), v]
    for slab, end in zip(slabs, ends, strict=True):
        slab_tiles = TileStats(tile_lse[slab.start // plan.block_n * stride :])
        tile_stats(inputs.columns(slab.start, end), slab_tiles, label, plan, slab.start, slab.values)
    combine(TileStats(tile_lse), inputs, label.logit, lse)


def exact_cross_entropy(
    x: Inputs, spec: LossSpec, factor: Tensor
) -> tuple[Tensor, Tensor, PrecomputedGradients | ExpCache | None]:
    """Return (loss, lse [N], what the backward pass starts from), depending on the budget.

    That is either the gradients for an upstream gradient of one, or exponentials for ``logit_stats_backward``, or None: all
    logits are then recomputed. dW may be allocated here, to hold exponentials until it is written.
    """
    inputs = LogitInputs.from_spec(x, spec).with_contiguous_rows()
    plan, backward_plan = (make_plan(inputs.hidden, inputs.weight, backward) for backward in (False, True))
    num_tiles, block_m = ceil_div(inputs.shape.v, plan.block_n), max(plan.block_m, backward_plan.block_m)
    block_n = max(plan.block_n, backward_plan.block_n)
    dw_block_n = block_n * (2 if uses_hopper(plan, x.bias, spec.softcap) else 1)  # a multiple of every kernel's BLOCK_N
    multiplies_whole = pays_and_fits(inputs.shape, num_tiles, spec.needs, spec.memory_budget)
    in_dw_buffer = spec.needs[1] and not spec.needs[2] and not multiplies_whole
    columns = plan_cache(inputs.shape, num_tiles, block_n, dw_block_n, in_dw_buffer, spec.memory_budget)
    size = group_size(inputs.shape, num_tiles, block_m, spec.needs, sum(columns or ()), spec.memory_budget)
    if not size and columns is None:
        return *cross_entropy(x, spec, factor), None
    label = label_logits(inputs, plan, plan.block_m if uses_hopper(plan, inputs.bias, inputs.softcap) else 0)
    lse = torch.empty_like(label.logit)
    saved: PrecomputedGradients | ExpCache
    if size or columns is None:
        saved = _gradients_by_groups(inputs, spec, factor, label, lse, size, (plan, backward_plan))
    else:
        saved = allocate_cache(inputs, columns, label)
        _compute_lse_and_cache(inputs, saved.slabs, label, lse, plan)
    return total_loss(lse, label.logit, factor, spec), lse, saved


def _gradients_by_groups(
    inputs: LogitInputs,
    spec: LossSpec,
    factor: Tensor,  # scalar
    label: LabelLogits,
    lse: Tensor,  # [N], written
    size: int,  # tokens per group
    plans: tuple[Plan, Plan],  # of the forward and of the backward pass
) -> PrecomputedGradients:
    (n, d, v, _), device, (plan, backward_plan) = inputs.shape, lse.device, plans
    one = torch.ones((), device=device, dtype=torch.float32)
    grad_hidden = torch.empty_like(inputs.hidden, memory_format=torch.contiguous_format)
    sums = torch.empty((v, d), device=device, dtype=torch.float32) if spec.needs[1] else None
    out = PrecomputedGradients(grad_hidden, sums, torch.empty_like(lse))
    values = empty_slab(inputs.hidden, min(n, size), v)  # reused by all groups
    for start in range(0, n, size):
        rows = slice(start, min(n, start + size))
        group, group_label = inputs.tokens(rows), label.tokens(rows, plan.block_m)
        slab = Slab(0, v, values[: group.shape.n])
        _compute_lse_and_cache(group, [slab], group_label, lse[rows], plan)
        grads = GradInputs.from_grads(lse[rows], None, TokenGrads.of_loss(one, factor, lse[rows], spec))
        group_gradients(group, slab, group_label.logit, grads, backward_plan, out.tokens(rows), start == 0)
    return out
