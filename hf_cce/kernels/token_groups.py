"""Gradients in the forward pass, a group of tokens at a time, where the budget has room for a group's exponentials.

With the exponentials of all columns a group's logits need not be computed a second time: three products instead of the four of
hf_cce.kernels.backward. The weight's gradient is summed over the groups in float32, half of it in the memory of its result; the
last group's product is added where the result is rounded (hf_cce.kernels.exp_matmul). All gradients are for an upstream
gradient of one; the backward pass multiplies them by the real one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.backward import write_logit_gradient
from hf_cce.kernels.exp_matmul import (
    BLOCK_V,
    hidden_gradient,
    label_factors,
    rows_at_a_time,
    scale_rows,
    sort_bytes,
    weight_gradient,
)
from hf_cce.kernels.inputs import LogitInputs, Shape, TokenGrads
from hf_cce.kernels.launch_config import Plan, ceil_div, empty_slab, padded
from hf_cce.kernels.matmul import multiply_add

# Measured on an H200 (hf_cce/bench/results/2026-11-22-h200-groups.txt). With dW, a group costs as much as a product over
# GROUP_TOKENS tokens: adding to dW moves 8 bytes for each of its entries, whatever the group's size. It saves SAVED of a product
# over its own tokens, of which an ExpCache of all columns would save SAVED_BY_CACHE too.
GROUP_TOKENS = 1150
SAVED, SAVED_BY_CACHE = 0.95, 0.7
# Rounding products apart moves 8 · V · D bytes, a pass over the exponentials of all tokens 4 · N · V: where these fit the budget,
# one group pays from this N / D on.
TOKENS_PER_WIDTH = 2
# Without dW, smaller groups leave the GPU idle.
HIDDEN_TOKENS = 512


class PrecomputedGrads(NamedTuple):
    """Gradients for an upstream gradient of one; None where not needed."""

    grad_hidden: Tensor | None  # [N, D]
    grad_weight: Tensor | None  # [V, D]


def group_size(shape: Shape, num_tiles: int, need_weight: bool, block_m: int, kept: int, budget: int) -> int:
    """Tokens of each group, the last one being smaller perhaps; 0 where the budget has no room for groups that pay.

    ``kept``: columns whose exponentials an ``ExpCache`` would hold instead.
    """
    n, d, v, dtype = shape
    if dtype == torch.float16 or n == 0:  # float16 has no range for exponentials
        return 0
    element = dtype.itemsize
    rest = 4 * d * (v - _rows_in_place(v, dtype)) if need_weight else 0
    fixed = 4 * d * rows_at_a_time(d, max(n, v)) + (sort_bytes(n, v) if need_weight else 0)
    per_token = element * padded(v) + 4 * num_tiles + 32 + (element * d if need_weight else 0)
    if fixed + n * per_token <= budget and (not need_weight or n >= TOKENS_PER_WIDTH * d):
        return ceil_div(n, block_m) * block_m
    if kept == v:
        return 0
    most = (budget - fixed - rest) // per_token // block_m * block_m
    if most < HIDDEN_TOKENS:
        return 0
    groups = ceil_div(n, most)
    size = ceil_div(ceil_div(n, groups), block_m) * block_m
    return 0 if need_weight and n / groups * (SAVED - SAVED_BY_CACHE * kept / v) < GROUP_TOKENS else size


def _rows_in_place(v: int, dtype: torch.dtype) -> int:
    """Rows of float32 sums that fit into the memory of dW in ``dtype``."""
    return v if dtype == torch.float32 else v // 2 // BLOCK_V * BLOCK_V


class Groups:
    """Forms gradients, one group of tokens after the other; ``values`` [group, V] is the memory of their exponentials."""

    def __init__(self, inputs: LogitInputs, size: int, need_hidden: bool, need_weight: bool, plan: Plan) -> None:
        n, _, v, _ = inputs.shape
        hidden, weight = inputs.hidden, inputs.weight
        contiguous = torch.contiguous_format
        self.inputs, self.plan = inputs, plan
        self.grad_hidden = torch.empty_like(hidden, memory_format=contiguous) if need_hidden else None
        self.grad_weight = torch.empty_like(weight, memory_format=contiguous) if need_weight else None
        self.of_label = torch.empty(n, device=hidden.device, dtype=torch.float32)
        self.sums: tuple[Tensor, ...] = ()
        self.values = empty_slab(hidden, min(n, size), v)

    def _sums(self) -> tuple[Tensor, ...]:
        """float32 sums [rows, D], of consecutive parts of the vocabulary: the first in the memory of dW."""
        assert self.grad_weight is not None
        v, d = self.grad_weight.shape
        half = _rows_in_place(v, self.grad_weight.dtype)
        in_place = (
            self.grad_weight.view(-1)[: 4 * half * d // self.grad_weight.itemsize].view(torch.float32).view(half, d)
        )
        if half == v:
            return (in_place,)
        rest = torch.empty((v - half, d), device=self.grad_weight.device, dtype=torch.float32)
        return (in_place, rest) if half else (rest,)

    def add(self, rows: slice, label_logit: Tensor, grads: TokenGrads) -> None:
        """Form the gradients of the tokens ``rows``: their exponentials are in ``values``, the arguments are theirs alone."""
        inputs, block_m = self.inputs.tokens(rows), self.plan.block_m
        (n, d, v, _), total = inputs.shape, self.inputs.shape.n
        values, of_label = self.values[:n], self.of_label[rows]
        scale = torch.empty_like(of_label)
        product = torch.empty((rows_at_a_time(d, max(total, v)), d), device=values.device, dtype=torch.float32)
        flags = label_factors(values, label_logit, inputs, grads, block_m, v, scale, of_label)
        write_logit_gradient(values, inputs, grads, 0, v, self.plan, flags)
        if self.grad_hidden is not None:
            hidden_gradient(values, inputs.weight, inputs.labels, scale, of_label, product, self.grad_hidden[rows])
        if self.grad_weight is None:
            return
        scaled = torch.empty((n, d), dtype=values.dtype, device=values.device)
        scale_rows(inputs.hidden, scale, scaled)
        if rows.stop == total:
            weight_gradient(values, scaled, self.inputs, self.of_label, product, self.grad_weight, self.sums)
            return
        first = not self.sums
        self.sums = self.sums or self._sums()
        begin = 0
        for sums in self.sums:
            end = begin + sums.shape[0]
            multiply_add(sums, values[:, begin:end].t(), scaled, first)
            begin = end


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
    """The gradients for the upstream gradient ``grad``, a scalar, in place."""
    for x in formed:
        if x is not None and x.numel():
            _multiply_kernel[(min(1024, ceil_div(x.numel(), 4096)),)](x, grad, x.numel(), BLOCK=4096, num_warps=8)
    return [*formed, None]
