"""Gradients in the forward pass, a group of tokens at a time, where the budget has room for a group's stored values.

With the values of all of the vocabulary the group's logits need not be computed a second time: three products instead of the
four of hf_cce.kernels.backward. The weight's gradient is added up over the groups in float32, half of it in the memory that
its result will have; of the last group it is formed as in hf_cce.kernels.scaled, which rounds it once. All gradients are for
an upstream gradient of one; the backward pass multiplies them by what that turns out to be.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.backward import write_logit_gradient
from hf_cce.kernels.plan import Plan, ceil_div, empty_slab, padded
from hf_cce.kernels.products import multiply_add
from hf_cce.kernels.scaled import (
    BLOCK_V,
    hidden_gradient,
    label_factors,
    rows_at_a_time,
    scale_rows,
    sort_bytes,
    weight_gradient,
)
from hf_cce.kernels.stored import Stored

# With a gradient of the weight a group costs as much as a product over so many tokens: adding to that gradient moves 8 bytes per
# entry of it, whatever the group's size. What it saves is a product over its own tokens, but for what a stored slab would save
# too. Measured on an H200, as is what follows (hf_cce/bench/results/2026-11-22-h200-groups.txt).
GROUP_TOKENS = 1150
SAVED, SAVED_BY_SLAB = 0.95, 0.7
# Rounding products in a pass of their own costs 8 · V · D bytes, a pass over all stored values 4 · N · V: where these fit, one
# group is worth it from N / D = 2 on.
TOKENS_PER_WIDTH = 2
# Without, groups of fewer tokens leave the GPU idle.
HIDDEN_TOKENS = 512


class Formed(NamedTuple):
    """Gradients for an upstream gradient of one; None where not needed."""

    grad_hidden: Tensor | None  # [N, D]
    grad_weight: Tensor | None  # [V, D]


class Group(NamedTuple):
    """The tokens from ``start`` to ``stop``, and the memory of their stored values."""

    start: int
    stop: int
    values: Tensor  # [stop − start, V]


def group_size(
    n: int, d: int, v: int, dtype: torch.dtype, num_tiles: int, need_weight: bool, block_m: int, slab: int, budget: int
) -> int:
    """Tokens of each group, the last one perhaps excepted; 0 where the budget has no room for groups that pay.

    ``slab``: columns that could be kept of all tokens instead (``stored_width``).
    """
    if dtype == torch.float16 or n == 0:  # float16 has no range for stored values
        return 0
    element = dtype.itemsize
    rest = 4 * d * (v - _rows_in_place(v, dtype)) if need_weight else 0
    fixed = 4 * d * rows_at_a_time(d, max(n, v)) + (sort_bytes(n, v) if need_weight else 0)
    per_token = element * padded(v) + 4 * num_tiles + 32 + (element * d if need_weight else 0)
    if fixed + n * per_token <= budget and (not need_weight or n >= TOKENS_PER_WIDTH * d):
        return ceil_div(n, block_m) * block_m
    if slab == v:
        return 0
    most = (budget - fixed - rest) // per_token // block_m * block_m
    if most < HIDDEN_TOKENS:
        return 0
    groups = ceil_div(n, most)
    size = ceil_div(ceil_div(n, groups), block_m) * block_m
    return 0 if need_weight and n / groups * (SAVED - SAVED_BY_SLAB * slab / v) < GROUP_TOKENS else size


def _rows_in_place(v: int, dtype: torch.dtype) -> int:
    """Rows of float32 sums that lie where the result will: of twice as many rows, if those are of 16 bits."""
    return v if dtype == torch.float32 else v // 2 // BLOCK_V * BLOCK_V


class Groups:
    """Forms gradients, one group of tokens after the other."""

    def __init__(
        self,
        hidden: Tensor,  # [N, D]
        weight: Tensor,  # [V, D]
        bias: Tensor | None,
        labels: Tensor,  # [N]
        ignore_index: int,
        logit_scale: float,
        softcap: float,
        size: int,
        need_hidden: bool,
        need_weight: bool,
        plan: Plan,  # of the backward pass
    ) -> None:
        (n, d), v = hidden.shape, weight.shape[0]
        self.inputs, self.plan, self.size = (hidden, weight, bias, labels), plan, size
        self.options = (ignore_index, logit_scale, softcap)
        self.grad_hidden = torch.empty((n, d), dtype=hidden.dtype, device=hidden.device) if need_hidden else None
        self.grad_weight = torch.empty((v, d), dtype=weight.dtype, device=hidden.device) if need_weight else None
        self.of_label = torch.empty(n, device=hidden.device, dtype=torch.float32)
        self.sums: tuple[Tensor, ...] = ()
        self.values = empty_slab(hidden, min(n, size), v)

    def groups(self) -> Iterator[Group]:
        """What is to be added, one after the other: their values lie in the same memory."""
        n = self.inputs[0].shape[0]
        for start in range(0, n, self.size):
            stop = min(n, start + self.size)
            yield Group(start, stop, self.values[: stop - start])

    def _sums(self) -> tuple[Tensor, ...]:
        """float32, of consecutive parts of the vocabulary."""
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

    def add(self, group: Group, stored: Stored, lse: Tensor, grad_lse: Tensor, grad_label: Tensor) -> None:
        """The gradients of a group's tokens; ``stored`` and vectors of these tokens."""
        start, stop, values = group
        hidden, weight, bias, labels = self.inputs
        (n, d), v = hidden.shape, weight.shape[0]
        h, y, of_label = hidden[start:stop], labels[start:stop], self.of_label[start:stop]
        scale = torch.empty_like(of_label)
        product = torch.empty((rows_at_a_time(d, max(n, v)), d), device=hidden.device, dtype=torch.float32)
        flags = label_factors(
            stored, y, lse, grad_lse, grad_label, *self.options, self.plan.block_m, v, scale, of_label
        )
        vectors = (y, lse, None, grad_lse, grad_label, None, None)
        write_logit_gradient(values, h, weight, bias, vectors, 0, v, *self.options, self.plan, flags)
        if self.grad_hidden is not None:
            hidden_gradient(values, weight, y, scale, of_label, product, self.grad_hidden[start:stop])
        if self.grad_weight is None:
            return
        scaled = torch.empty((stop - start, d), dtype=hidden.dtype, device=hidden.device)
        scale_rows(h, scale, scaled)
        if stop == n:
            weight_gradient(values, scaled, hidden, labels, self.of_label, product, self.grad_weight, self.sums)
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
    """x · by, in place, unless that is one. Zero stays zero: that of no tokens, whose number the loss was divided by."""
    factor = tl.load(by).to(tl.float32)
    if factor != 1.0:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for first in range(tl.program_id(0).to(tl.int64) * BLOCK, size, step):
            at = first + tl.arange(0, BLOCK)
            value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
            tl.store(x + at, tl.where(value == 0, 0.0, value * factor).to(x.dtype.element_ty), mask=at < size)


def formed_gradients(formed: Formed, grad: Tensor) -> list[Tensor | None]:
    """The gradients for the upstream gradient ``grad``, a scalar; in the memory of ``formed``."""
    for x in formed:
        if x is not None and x.numel():
            _multiply_kernel[(min(1024, ceil_div(x.numel(), 4096)),)](x, grad, x.numel(), BLOCK=4096, num_warps=8)
    return [*formed, None]
