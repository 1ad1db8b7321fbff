"""The gradient of a frozen head's hidden states, formed in the forward pass, a group of tokens at a time.

With the exponentials of all columns a group's logits need not be computed a second time: two products instead of three. The
gradient is for an upstream gradient of one; the backward pass multiplies it by the real one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.backward import write_logit_gradient
from hf_cce.kernels.exp_matmul import hidden_gradient, label_factors, rows_at_a_time
from hf_cce.kernels.inputs import LogitInputs, Shape, TokenGrads
from hf_cce.kernels.launch_config import Plan, ceil_div, empty_slab, padded

FEWEST_TOKENS = 512  # smaller groups leave the GPU idle (hf_cce/bench/results/2026-11-22-h200-groups.txt)


class PrecomputedGrads(NamedTuple):
    """The gradient for an upstream gradient of one."""

    grad_hidden: Tensor  # [N, D]


def group_size(shape: Shape, num_tiles: int, block_m: int, budget: int) -> int:
    """Tokens of each group, the last one being smaller perhaps; 0 where the budget has no room for groups that pay."""
    n, d, v, dtype = shape
    if dtype == torch.float16 or n == 0:  # float16 has no range for exponentials
        return 0
    per_token = dtype.itemsize * padded(v) + 4 * num_tiles + 32
    most = (budget - 4 * d * rows_at_a_time(d, n)) // per_token // block_m * block_m
    if most < min(n, FEWEST_TOKENS):
        return 0
    return ceil_div(ceil_div(n, ceil_div(n, most)), block_m) * block_m


def group_gradient(
    inputs: LogitInputs,
    values: Tensor,  # [N, V], the exponentials of all logits; overwritten
    label_logit: Tensor,  # [N]
    grads: TokenGrads,
    plan: Plan,
    out: Tensor,  # [N, D], written
) -> None:
    """The gradient of the hidden states of one group of tokens."""
    n, d, v, _ = inputs.shape
    scale, of_label = empty_slab(label_logit, 2, n).unbind()
    flags = label_factors(values, label_logit, inputs, grads, plan.block_m, v, scale, of_label)
    write_logit_gradient(values, inputs, grads, 0, v, plan, flags)
    product = torch.empty((rows_at_a_time(d, n), d), device=values.device, dtype=torch.float32)
    hidden_gradient(values, inputs.weight, inputs.labels, scale, of_label, product, out)


@triton.jit
def _multiply_kernel(x, by, size, BLOCK: tl.constexpr):
    """x · by, in place, unless that is one. Zero stays zero: without tokens, the loss was divided by their number."""
    factor = tl.load(by).to(tl.float32)
    if factor != 1.0:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for first in range(tl.program_id(0).to(tl.int64) * BLOCK, size, step):
            at = first + tl.arange(0, BLOCK)
            value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
            tl.store(x + at, tl.where(value == 0, 0.0, value * factor).to(x.dtype.element_ty), mask=at < size)


def formed_gradients(formed: PrecomputedGrads, grad: Tensor) -> list[Tensor | None]:
    """The gradients of hidden, weight and bias for the upstream gradient ``grad``, a scalar, in place."""
    x = formed.grad_hidden
    _multiply_kernel[(min(1024, ceil_div(x.numel(), 4096)),)](x, grad, x.numel(), BLOCK=4096, num_warps=8)
    return [x, None, None]
