"""Gradients computed in the forward pass, for one group of tokens at a time.

The exponentials of all columns of a group are stored, so its logits are computed only once (see hf_cce.kernels.exp_products). dW
is summed over the groups in float32. The gradients are for an upstream gradient of one; the backward pass multiplies them by the
actual one, and adds the labels' entries to dW.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_cce.kernels import exp_products
from hf_cce.kernels.backward import finish_exponentials
from hf_cce.kernels.exp_cache import Slab, fill_cache
from hf_cce.kernels.inputs import GradInputs, LogitInputs, Shape
from hf_cce.kernels.labels import LabelLogits
from hf_cce.kernels.launch_config import Plan, ceil_div, empty_slab, row_major
from hf_cce.matmul import multiply_add
from hf_cce.spec import Inputs, LossSpec, TokenGrads

MIN_GROUP_TOKENS = 512  # smaller groups leave the GPU idle
# Measured on an H200: the shares of the product that recomputes the logits that groups save, and a cache of all columns.
SAVED_BY_GROUPS, SAVED_BY_CACHE = 0.95, 0.7
# Each group reads and writes the sums for dW, which takes as long as a product with this many more tokens.
GROUP_OVERHEAD_TOKENS = 1150


class PrecomputedGradients(NamedTuple):
    """Gradients for an upstream gradient of one."""

    grad_hidden: Tensor  # [N, D]
    weight_sums: Tensor | None  # [V, D] float32: dW without the labels' entries; None if it is not needed
    label_entry: Tensor  # [N]


def group_size(
    shape: Shape, num_tiles: int, block_m: int, needs: tuple[bool, bool, bool], cached: int, budget: int
) -> int:
    """Return the number of tokens per group; 0 if other gradients are needed, or the budget has no room for groups that pay.

    ``cached``: number of columns that hf_cce.kernels.exp_cache would cache for all tokens if groups were not used.
    """
    (n, d, v, dtype), (need_hidden, need_weight, need_bias) = shape, needs
    if need_bias or not need_hidden or cached == v or dtype == torch.float16 or n == 0:  # float16: see exp_cache
        return 0
    left = budget - 4 * d * exp_products.rows_at_a_time(d, n)
    if need_weight:
        # In the forward pass, the sums replace dW, which the budget does not count. In the backward pass, both exist.
        left -= (4 - dtype.itemsize) * v * d
        if dtype.itemsize < 4 and 4 * v * d > budget:
            return 0
    max_tokens = left // exp_products.bytes_per_token(shape, num_tiles, need_weight) // block_m * block_m
    if max_tokens < min(n, MIN_GROUP_TOKENS):
        return 0
    groups = ceil_div(n, max_tokens)
    if need_weight and n / groups * (SAVED_BY_GROUPS - SAVED_BY_CACHE * cached / v) < GROUP_OVERHEAD_TOKENS:
        return 0
    return ceil_div(ceil_div(n, groups), block_m) * block_m


def gradients_by_groups(
    inputs: LogitInputs,
    spec: LossSpec,
    factor: Tensor,  # scalar
    label: LabelLogits,
    lse: Tensor,  # [N], written
    size: int,  # tokens per group
    plans: tuple[Plan, Plan],  # of the forward and of the backward pass
) -> PrecomputedGradients:
    """Compute ``lse`` and the gradients, one group of tokens after the other."""
    (n, d, v, _), device, (plan, backward_plan) = inputs.shape, lse.device, plans
    one = torch.ones((), device=device, dtype=torch.float32)
    grad_hidden = torch.empty_like(inputs.hidden, memory_format=torch.contiguous_format)
    sums = torch.empty((v, d), device=device, dtype=torch.float32) if spec.needs[1] else None
    label_entry = torch.empty_like(lse)
    values = empty_slab(inputs.hidden, min(n, size), v)  # reused by all groups
    for start in range(0, n, size):
        rows = slice(start, min(n, start + size))
        group, group_label = inputs.tokens(rows), label.tokens(rows, plan.block_m)
        slab = Slab(0, v, values[: group.shape.n])
        fill_cache(group, [slab], group_label, lse[rows], plan)
        grads = GradInputs(lse[rows], TokenGrads.of_loss(one, factor, lse[rows], spec))
        factors = finish_exponentials(slab, group_label.logit, group, grads, backward_plan)
        if sums is not None:
            scaled = exp_products.scale_tokens(group.hidden, factors.scale)
            multiply_add(sums, slab.values.t(), scaled, first=start == 0)
            label_entry[rows] = factors.label_entry
        exp_products.write_hidden_gradient(slab.values, factors, group, grad_hidden[rows])
    return PrecomputedGradients(grad_hidden, sums, label_entry)


def scale_precomputed_gradients(
    gradients: PrecomputedGradients, x: Inputs, spec: LossSpec, grad: Tensor
) -> tuple[Tensor | None, Tensor | None, None]:
    """Return the gradients of hidden states and weight for the scalar upstream gradient ``grad``. Consumes ``gradients``."""
    (grad_hidden, sums, label_entry), (need_hidden, need_weight, _) = gradients, spec.needs
    grad_weight = None
    if need_weight and sums is not None:
        grad_weight = sums if x.weight.dtype == sums.dtype else torch.empty_like(sums, dtype=x.weight.dtype)
        addends = exp_products.label_addends(row_major(x.hidden), x.labels, label_entry, len(sums))
        exp_products.add_and_round(sums, 0, grad_weight, addends, grad=grad)
    if need_hidden:
        exp_products.add_and_round(grad_hidden, 0, grad_hidden, grad=grad)
    return grad_hidden if need_hidden else None, grad_weight, None
