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
from hf_cce.kernels.plan import Plan, ceil_div, padded
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
from hf_cce.kernels.stored import Stored, lent_columns, lent_values

# With a gradient of the weight a group costs as much as a product over so many tokens: adding to that gradient moves 8 bytes per
# entry of it, whatever the group's size. What it saves is a product over its own tokens, but for what a stored slab would save
# too. Measured on an H200, as is what follows (hf_cce/bench/results/2026-11-22-h200-groups.txt).
GROUP_TOKENS = 1150
SAVED, SAVED_BY_SLAB = 0.95, 0.7
# Without, groups of fewer tokens leave the GPU idle.
HIDDEN_TOKENS = 512


class Formed(NamedTuple):
    """Gradients for an upstream gradient of one; None where not needed."""

    grad_hidden: Tensor | None  # [N, D]
    grad_weight: Tensor | None  # [V, D]


class Sizes(NamedTuple):
    """Of the groups, and of what the first may use that the others may not."""

    first: int  # tokens of the first group
    later: int  # of each that follows, the last perhaps excepted
    # Columns whose values, of the first group, lie at the end of the memory that the weight's gradient will have: while their
    # product is written to its beginning nothing else needs it, and when it is done, nothing needs them.
    lent: int = 0


class Part(NamedTuple):
    """Stored values of a group: of the columns from ``begin`` to ``end``."""

    begin: int
    end: int
    values: Tensor  # [tokens of the group, end − begin]


class Group(NamedTuple):
    """Of the tokens from ``start`` to ``stop``."""

    start: int
    stop: int
    parts: list[Part]  # of consecutive columns, all of the vocabulary


def group_sizes(
    n: int,
    d: int,
    v: int,
    dtype: torch.dtype,
    num_tiles: int,
    need_weight: bool,
    block_m: int,
    block_n: int,
    slab: int,
    budget: int,
) -> Sizes | None:
    """Tokens of the groups; None where the budget has no room for groups that pay.

    ``slab``: columns that could be kept of all tokens instead (``stored_width``).
    """
    if dtype == torch.float16 or n == 0 or slab == v:  # float16 has no range for stored values
        return None
    element = dtype.itemsize
    rest = 4 * d * (v - _rows_in_place(v, dtype)) if need_weight else 0
    fixed = 4 * d * rows_at_a_time(d, max(n, v)) + (sort_bytes(n, v) if need_weight else 0)
    per_token = element * padded(v) + 4 * num_tiles + 32 + (element * d if need_weight else 0)
    most = (budget - fixed - rest) // per_token // block_m * block_m
    if most < HIDDEN_TOKENS:
        return None
    groups = ceil_div(n, most)
    size = ceil_div(ceil_div(n, groups), block_m) * block_m
    sizes = Sizes(size, size)
    if need_weight and groups > 1:
        sizes = _lending(n, d, v, dtype, num_tiles, block_m, block_n, groups, budget) or sizes
        groups = 1 + ceil_div(n - sizes.first, sizes.later)
    return None if need_weight and n / groups * (SAVED - SAVED_BY_SLAB * slab / v) < GROUP_TOKENS else sizes


def _lending(
    n: int, d: int, v: int, dtype: torch.dtype, num_tiles: int, block_m: int, block_n: int, groups: int, budget: int
) -> Sizes | None:
    """Sizes with which there are fewer than ``groups``, as the weight's gradient lends the first one its memory."""
    element, half = dtype.itemsize, _rows_in_place(v, dtype, block_n)
    rest, product = 4 * d * (v - half), 4 * d * rows_at_a_time(d, max(n, v))
    left = budget - sort_bytes(n, v) - 64 * n - 64

    def beside(size: int) -> int:
        """Bytes of the tiles' statistics, or then of the products."""
        return max(4 * num_tiles * padded(size), product + element * size * d)

    most = max(left - rest - product, 0) // (element * padded(v)) // block_m * block_m
    for fewer in range(2, groups):
        for later in range(most, HIDDEN_TOKENS - 1, -block_m):
            first = max(ceil_div(n - (fewer - 1) * later, block_m), 1) * block_m
            lent = lent_columns(first, d, v, element, 4, block_n)
            own = element * first * (padded(v) - lent)
            if own + beside(first) > left:  # as for all smaller ones that would follow
                break
            # What the sums of the other half take must have been freed by the columns before them.
            fits = max(own, rest + element * later * padded(v)) + beside(max(first, later)) <= left
            if fits and lent and rest <= element * first * (half - lent):
                return Sizes(first, later, lent)
    return None


def _rows_in_place(v: int, dtype: torch.dtype, block: int = BLOCK_V) -> int:
    """Rows of float32 sums that lie where the result will: of twice as many rows, if those are of 16 bits."""
    return v if dtype == torch.float32 else v // 2 // block * block


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
        sizes: Sizes,
        block_n: int,
        need_hidden: bool,
        need_weight: bool,
        plan: Plan,  # of the backward pass
    ) -> None:
        (n, d), v = hidden.shape, weight.shape[0]
        self.inputs, self.plan, self.sizes = (hidden, weight, bias, labels), plan, sizes
        self.options = (ignore_index, logit_scale, softcap)
        self.grad_hidden = torch.empty((n, d), dtype=hidden.dtype, device=hidden.device) if need_hidden else None
        self.grad_weight = torch.empty((v, d), dtype=weight.dtype, device=hidden.device) if need_weight else None
        self.of_label = torch.empty(n, device=hidden.device, dtype=torch.float32)
        self.half = _rows_in_place(v, weight.dtype, block_n if sizes.lent else BLOCK_V)
        self.sums: tuple[Tensor, ...] = ()
        rest = 4 * d * (v - self.half) // hidden.element_size() if sizes.lent else 0
        self.start_of_later = ceil_div(rest, 16) * 16  # in the room that is lent to: behind the sums
        first = min(n, sizes.first) * (padded(v) - sizes.lent)
        self.room = hidden.new_empty(max(first, self.start_of_later + min(n, sizes.later) * padded(v)))

    def groups(self) -> Iterator[Group]:
        """What is to be added, one after the other: their values lie in the same memory."""
        n, v, start = self.inputs[0].shape[0], self.inputs[1].shape[0], 0
        while start < n:
            stop = min(n, start + (self.sizes.later if start else self.sizes.first))
            if start or not self.sizes.lent:
                parts = [Part(0, v, _matrix(self.room, self.start_of_later, stop - start, v))]
            else:
                parts = list(self._first_parts(stop))
            yield Group(start, stop, parts)
            start = stop

    def _first_parts(self, size: int) -> Iterator[Part]:
        assert self.grad_weight is not None
        lent, half, v = self.sizes.lent, self.half, self.inputs[1].shape[0]
        yield Part(0, lent, lent_values(self.grad_weight, size, lent))
        yield Part(lent, half, _matrix(self.room, 0, size, half - lent))
        if half < v:
            yield Part(half, v, _matrix(self.room, size * (half - lent), size, v - half))

    def _sums(self) -> tuple[Tensor, ...]:
        """float32, of consecutive parts of the vocabulary."""
        assert self.grad_weight is not None
        (v, d), half = self.grad_weight.shape, self.half
        in_place = (
            self.grad_weight.view(-1)[: 4 * half * d // self.grad_weight.itemsize].view(torch.float32).view(half, d)
        )
        if half == v:
            return (in_place,)
        if self.sizes.lent:  # where the values of the columns before them were
            rest = self.room[: self.start_of_later].view(torch.float32)[: (v - half) * d].view(v - half, d)
        else:
            rest = torch.empty((v - half, d), device=self.grad_weight.device, dtype=torch.float32)
        return (in_place, rest) if half else (rest,)

    def add(self, group: Group, stored: Stored, lse: Tensor, grad_lse: Tensor, grad_label: Tensor) -> None:
        """The gradients of a group's tokens; ``stored`` but for the values, and vectors of these tokens."""
        start, stop, parts = group
        hidden, weight, bias, labels = self.inputs
        (n, d), v = hidden.shape, weight.shape[0]
        h, y, of_label = hidden[start:stop], labels[start:stop], self.of_label[start:stop]
        scale = torch.empty_like(of_label)
        product = torch.empty((rows_at_a_time(d, max(n, v)), d), device=hidden.device, dtype=torch.float32)
        vectors = (y, lse, None, grad_lse, grad_label, None, None)
        for begin, end, values in parts:
            flags = label_factors(
                stored._replace(values=values), y, lse, grad_lse, grad_label, *self.options, self.plan.block_m, v, scale,
                of_label, begin,
            )  # fmt: skip
            write_logit_gradient(values, h, weight, bias, vectors, begin, end, *self.options, self.plan, flags)
        every = [part.values for part in parts]
        if self.grad_hidden is not None:
            hidden_gradient(every, weight, y, scale, of_label, product, self.grad_hidden[start:stop])
        if self.grad_weight is None:
            return
        scaled = torch.empty((stop - start, d), dtype=hidden.dtype, device=hidden.device)
        scale_rows(h, scale, scaled)
        if stop == n:
            weight_gradient(every[0], scaled, hidden, labels, self.of_label, product, self.grad_weight, self.sums)
            return
        first = not self.sums
        self.sums = self.sums or self._sums()
        for begin, end, values in parts:
            top = 0
            for sums in self.sums:
                bottom = top + sums.shape[0]
                low, high = max(begin, top), min(end, bottom)
                if low < high:
                    multiply_add(sums[low - top : high - top], values[:, low - begin : high - begin].t(), scaled, first)
                top = bottom


def _matrix(room: Tensor, start: int, rows: int, width: int) -> Tensor:
    """[rows, width] from ``start`` on, rows ``padded(width)`` apart."""
    return room[start : start + rows * padded(width)].view(rows, padded(width))[:, :width]


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
