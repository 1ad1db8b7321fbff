"""Forward pass of the scalar loss without the gradient filter."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_cce.kernels.exp_cache import ExpCache, allocate_cache, fill_cache, plan_cache
from hf_cce.kernels.exp_products import pays_and_fits
from hf_cce.kernels.forward import logit_stats
from hf_cce.kernels.inputs import LogitInputs
from hf_cce.kernels.labels import label_logits
from hf_cce.kernels.launch_config import ceil_div, make_plan, uses_hopper
from hf_cce.kernels.token_groups import PrecomputedGradients, gradients_by_groups, group_size
from hf_cce.spec import Inputs, LogitStats, LossSpec, WantedStats


def exact_stats(x: Inputs, spec: LossSpec, factor: Tensor) -> tuple[LogitStats, PrecomputedGradients | ExpCache | None]:
    """Return logsumexps and label logits, and what the backward pass starts from, depending on the budget.

    The latter is either the gradients for an upstream gradient of one, or exponentials for ``logit_stats_backward``, or None: all
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
        return logit_stats(x, spec, WantedStats()), None
    label = label_logits(inputs, plan, plan.block_m if hopper else 0)
    lse = torch.empty_like(label.logit)
    saved: PrecomputedGradients | ExpCache
    if size or columns is None:
        saved = gradients_by_groups(inputs, spec, factor, label, lse, size, (plan, backward_plan))
    else:
        saved = allocate_cache(inputs, columns, label)
        fill_cache(inputs, saved.slabs, label, lse, plan)
    return LogitStats(lse, label.logit, *[lse.new_empty(0)] * 4), saved
