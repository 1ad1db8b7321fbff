"""The scalar loss without the gradient filter, from the statistics of tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.exp_cache import ExpCache, allocate_cache, fill_cache, plan_cache
from hf_cce.kernels.exp_products import pays_and_fits
from hf_cce.kernels.forward import logit_stats
from hf_cce.kernels.inputs import LogitInputs
from hf_cce.kernels.labels import label_logits
from hf_cce.kernels.launch_config import ceil_div, make_plan, uses_hopper
from hf_cce.kernels.launcher import Kernel
from hf_cce.kernels.token_groups import PrecomputedGradients, gradients_by_groups, group_size
from hf_cce.spec import Inputs, LossSpec, WantedStats


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


def exact_cross_entropy(
    x: Inputs, spec: LossSpec, factor: Tensor
) -> tuple[Tensor, Tensor, PrecomputedGradients | ExpCache | None]:
    """Return (loss, lse [N], what the backward pass starts from), depending on the budget.

    That is either the gradients for an upstream gradient of one, or exponentials for ``logit_stats_backward``, or None: all
    logits are then recomputed. dW may be allocated here, to hold exponentials until it is written.
    """
    inputs, needs, budget = LogitInputs.from_spec(x, spec), spec.needs, spec.memory_budget
    plan, backward_plan = (make_plan(inputs.hidden, inputs.weight, backward) for backward in (False, True))
    hopper = uses_hopper(plan, x.bias, spec.softcap)
    # Multiples of the blocks of every kernel
    block_m, block_n = max(plan.block_m, backward_plan.block_m), max(plan.block_n, backward_plan.block_n)
    dw_block_n = 2 * block_n if hopper else block_n
    num_tiles = ceil_div(inputs.shape.v, plan.block_n)
    may_use_dw = needs[1] and not needs[2] and not pays_and_fits(inputs.shape, num_tiles, needs, budget)
    columns = plan_cache(inputs.shape, num_tiles, block_n, dw_block_n, may_use_dw, budget)
    size = group_size(inputs.shape, num_tiles, block_m, needs, sum(columns or ()), budget)
    if not size and columns is None:
        return *cross_entropy(x, spec, factor), None
    label = label_logits(inputs, plan, plan.block_m if hopper else 0)
    lse = torch.empty_like(label.logit)
    saved: PrecomputedGradients | ExpCache
    if size or columns is None:
        saved = gradients_by_groups(inputs, spec, factor, label, lse, size, (plan, backward_plan))
    else:
        saved = allocate_cache(inputs, columns, label)
        fill_cache(inputs, saved.slabs, label, lse, plan)
    return total_loss(lse, label.logit, factor, spec), lse, saved
