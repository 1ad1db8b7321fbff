"""The scalar loss with the gradient filter: forward leaves the statistics of tiles, backward computes the tiles that matter.

hf_cce.kernels.filter chooses them, hf_cce.kernels.sparse computes and multiplies them. What is dropped enters the gradients by
its mass: two products with the blocks of the vocabulary in place of its entries, 128 times smaller than a dense one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from hf_cce.kernels.filter import Kept, Mass, dropped_mass, mass_bytes, select
from hf_cce.kernels.forward import combine, tile_stats, tile_stride
from hf_cce.kernels.order import Order, Vocabulary, permute_rows, sort_tokens, sort_vocabulary
from hf_cce.kernels.plan import Plan, descriptor, filter_plan, operand, specialised
from hf_cce.kernels.products import multiply_add
from hf_cce.kernels.residual import column_residual, residual, rounding, sample, token_energy
from hf_cce.kernels.rest import _rest_hidden_kernel, _rest_weight_kernel
from hf_cce.kernels.sparse import (
    _aside_kernel,
    _hidden_gradient_kernel,
    _kept_tiles_kernel,
    _weight_gradient_kernel,
)
from hf_cce.kernels.stored import label_logits
from hf_cce.kernels.tilt import DIRECTIONS, Leaning, covariance, kept_bytes, leaning, making_bytes, tilted_rows

SAMPLED = 64  # tokens whose error is measured; fewer where the budget is small, but not fewer than
FEWEST_SAMPLED = 8
ROUNDINGS = 4  # times so many whose rounding errors are: some have many times as much as others
SAMPLED_COLUMNS = 256
MAX_PASSES = 96
MARGIN = 1.25  # how much more tiles may be kept than before without leaving some to hf_cce.kernels.rest


@dataclass(frozen=True)
class Layout:
    """How the scratch is divided: decided from shapes alone, before anything is known of the data."""

    slab: int  # vocabulary entries whose rows of the weight are put in order at a time
    keep_rows: bool  # whether all of them stay so until the backward pass
    slots: int  # tiles of the logits' gradient that a pass holds
    room: int  # kept tiles after which a new pass begins
    passes: int  # as many as can be needed
    sampled: int  # tokens whose error may be measured
    tilted: bool  # whether there is room for what hf_cce.kernels.tilt needs


def make_layout(
    n: int, d: int, v: int, element: int, softcap: bool, need_weight: bool, plan: Plan, budget: int
) -> Layout | None:
    """The division of ``budget`` bytes, or None where they do not suffice. ``element``: bytes of an element of the inputs."""
    rows, cols = triton.cdiv(n, plan.block_m), triton.cdiv(v, plan.block_n)
    orders = 4 * (3 * v + 4 * n)
    means = (element + 4) * cols * d
    statistics = (4 + 2 + 2 * softcap) * cols * n
    mass, lists = mass_bytes(n, cols, element, plan.block_m), 4 * (7 * rows * cols + 8 * cols)
    hidden, total = element * n * d, 4 * n * d
    tile = element * plan.block_m * plan.block_n
    for keep_rows, tilted in product((True, False), (True, False)):
        # with a gradient of the weight its own memory holds the rows in order until it is written
        weight = element * v * d if keep_rows and not need_weight else 0
        tilt = kept_bytes(d, v, element, True, need_weight) * tilted
        standing = orders + means + hidden + weight + tilt
        # at the three moments that need most: the forward pass, the choice of tiles, the products
        slab = v if keep_rows else (budget - standing - statistics) // (element * d) // plan.block_n * plan.block_n
        choice = standing + statistics + mass + lists
        products = standing + lists + total
        slots = (budget - products) // tile
        if (
            slab < min(v, 32 * plan.block_n)
            or standing + statistics > budget
            or slots < max(2 * rows, 4 * plan.programs)
            or products + mass + hidden * tilted > budget
            or 8 * tilt > budget
            or (tilted and choice + making_bytes(n, d, v, element, plan.block_n, need_weight) > budget)
        ):
            continue
        # their logits in float32, what is left out of their gradient, and a copy of it in another order
        sampled = min(n, SAMPLED, (budget - choice) // ((4 + element * (1 if keep_rows else 2)) * v))
        if sampled < min(n, FEWEST_SAMPLED):
            continue
        slots = min(slots, rows * cols)
        room = slots if slots == rows * cols else slots - rows
        passes = triton.cdiv(rows * cols, room)
        # With many passes it costs less to gather rows than to keep them or to compute tiles twice.
        if passes <= (MAX_PASSES // 8 if keep_rows else MAX_PASSES):
            return Layout(min(slab, v), keep_rows, slots, room, passes, sampled, tilted)
    return None


class Report(NamedTuple):
    """What the filter did in one backward pass; tensors stay on the device until somebody asks."""

    kept: Tensor  # scalar: tiles computed
    tiles: int  # of so many
    dropped: Tensor  # partial sums of the tokens' probability in dropped tiles
    tokens: int
    tau: Tensor  # scalar: the threshold
    error: Tensor | None  # scalar: error of the hidden states' gradient, relative to its norm, where it was measured
    weight_error: Tensor | None  # likewise of the weight's gradient
    rounding_error: Tensor | None = None  # the first of these as rounding the logits to the inputs' dtype would make it
    rounding_weight_error: Tensor | None = None  # and the second


@dataclass
class Filtered:
    """What the forward pass leaves to the backward pass. N-long tensors are in the order of ``order.tokens``."""

    order: Order
    hidden: Tensor  # [N, D]
    weight: Tensor | None  # [V, D] in the order of columns, if the layout keeps it
    bias: Tensor | None  # [V], likewise
    means: Tensor  # [T, D]: mean rows of the column blocks
    lse: Tensor  # [N]
    label_logit: Tensor  # [N]
    tile_lse: Tensor  # [T, N] and the next two
    tile_ratio: Tensor
    tile_damping: Tensor | None
    layout: Layout
    plan: Plan
    vocabulary: Vocabulary


def forward(
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    bias: Tensor | None,
    labels: Tensor,  # [N]
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    layout: Layout,
    plan: Plan,
    vocabulary: Vocabulary | None,
) -> Filtered:
    """What the backward pass needs, and the loss: ``lse`` and ``label_logit`` of each token, zero where it is ignored."""
    (n, d), v = hidden.shape, weight.shape[0]
    cols = triton.cdiv(v, plan.block_n)
    if vocabulary is None:
        vocabulary = sort_vocabulary(hidden, weight, bias, plan.block_n)
    order = sort_tokens(labels, vocabulary, ignore_index)
    hidden = hidden.index_select(0, order.tokens)
    if bias is not None:
        bias = bias.index_select(0, order.order[:v])
    means = weight.new_empty((cols, d))
    lse, label_logit = torch.empty((2, n), device=hidden.device).unbind()
    tile_lse = torch.empty((cols, tile_stride(n)), device=hidden.device)
    tile_ratio = torch.empty((cols, tile_stride(n)), dtype=torch.bfloat16, device=hidden.device)
    tile_damping = torch.empty_like(tile_ratio) if softcap > 0 else None
    in_order, live = None, None
    if specialised(plan, bias, softcap):
        label_logit, live = label_logits(
            hidden, weight, bias, order.labels, v, logit_scale, softcap, plan, plan.block_m, order.order
        )
    for first in range(0, v, layout.slab):
        stop, block = min(v, first + layout.slab), first // plan.block_n
        in_order = None  # frees the slab before
        in_order = permute_rows(weight, order.order, first, stop, means, plan.block_n, copy=True)
        assert in_order is not None
        tile_stats(
            hidden, in_order, None if bias is None else bias[first:stop], order.labels,
            [tile_lse[block:], None, None, None, None], label_logit, first, v, logit_scale, softcap, plan,
            tile_ratio[block:], None if tile_damping is None else tile_damping[block:], live=live,
        )  # fmt: skip
    combine([tile_lse, *[None] * 4], label_logit, order.labels, lse, [None] * 4, v, cols, v)
    return Filtered(
        order, hidden, in_order if layout.keep_rows else None, bias, means, lse, label_logit, tile_lse, tile_ratio, tile_damping,
        layout, plan, vocabulary,
    )  # fmt: skip


def backward(
    saved: Filtered,
    weight: Tensor,  # [V, D]
    grad_lse: Tensor,  # [N] in the order of rows
    grad_label: Tensor,  # [N]
    tau: Tensor,
    logit_scale: float,
    softcap: float,
    need_hidden: bool,
    need_weight: bool,
    measure: bool,
    keep_all: bool,
    expected: float | None = None,
) -> tuple[Tensor, Tensor, Report]:
    """(gradient of hidden [N, D] in the tokens' own order, of weight [V, D], report), empty where not needed.

    Consumes ``saved``. With ``keep_all`` the report tells what the filter would have done. ``expected``: the share of tiles
    that an earlier step kept; it decides how many passes are launched, and should not be far too small.
    """
    hidden, order, layout, plan = saved.hidden, saved.order, saved.layout, saved.plan
    (n, d), v, dtype = hidden.shape, weight.shape[0], hidden.dtype
    rows, cols, passes = triton.cdiv(n, plan.block_m), triton.cdiv(v, plan.block_n), layout.passes

    gather = saved.weight is None
    # The rows in order, where the layout kept them, lie in the memory of the gradient that will overwrite them.
    in_place = need_weight and not gather
    waits = in_place and need_hidden and passes > 1
    launched = passes
    if expected is not None and not keep_all:
        launched = min(passes, 1 + math.ceil(MARGIN * expected * rows * cols / layout.room))

    def choose(tau: Tensor) -> Kept:
        return select(
            saved.tile_lse, saved.tile_ratio, saved.lse, saved.label_logit, order.labels, tau,
            v, softcap, plan.block_m, plan.block_n, layout.room, passes, layout.slots * plan.block_m if waits else 0, d,
        )  # fmt: skip

    kept = choose(tau)
    count = kept.start[-1]

    def leave(kept: Kept) -> Mass:
        return dropped_mass(
            kept, saved.tile_lse, saved.tile_damping, saved.lse, order.labels, grad_lse, v, logit_scale, dtype, plan.block_m
        )  # fmt: skip

    mass = leave(kept)
    dropped = mass.dropped
    tilt, lean, learnt = None, None, saved.vocabulary
    if layout.tilted and dtype != torch.float16:  # which has no range for it
        if need_hidden and learnt.tilt is None:
            learnt.tilt = covariance(weight, order.order, dropped.sum(1), plan.block_n)
        if need_weight and learnt.leaning is None:
            learnt.leaning = leaning(hidden, weight, order.order, mass.of_token, plan.block_n)
        tilt = learnt.tilt if need_hidden else None
        lean = learnt.leaning if need_weight else None
    errors: dict[str, Tensor | None] = {"error": None, "weight_error": None}
    if measure:
        at = (saved, weight, grad_lse, logit_scale, softcap)
        if need_hidden:
            errors["error"] = _hidden_error(*at, kept, mass, tilt)
        if need_weight:
            errors["weight_error"] = _weight_error(*at, kept, mass, lean)
        of_hidden, of_weight = _rounding_errors(saved, weight, grad_lse, grad_label, logit_scale, softcap)
        errors |= {"rounding_error": of_hidden} if need_hidden else {}
        errors |= {"rounding_weight_error": of_weight} if need_weight else {}
    if keep_all:
        del kept, mass
        kept = choose(torch.zeros_like(tau))
        mass = leave(kept)
    # Their memory is what the kept tiles are written to.
    del saved.tile_lse, saved.tile_ratio, saved.tile_damping
    total = torch.empty((n, d) if need_hidden else 0, device=hidden.device)
    if need_hidden:
        multiply_add(total, mass.rows.t(), saved.means, first=True)
        if tilt is not None:
            multiply_add(total, tilted_rows(hidden, mass.of_token, logit_scale), tilt, first=False)
    spread = torch.empty((cols, d) if need_weight else 0, device=hidden.device)
    if need_weight:
        multiply_add(spread, mass.rows, hidden, first=True)
    leans = None if lean is None else mass.leaves.sum(1) * logit_scale
    del mass
    source = weight if saved.weight is None else saved.weight
    bk, bd, wd = plan.sparse_block_k, plan.block_d, plan.weight_block_d
    scratch = hidden.new_empty((layout.slots * plan.block_m, plan.block_n))
    blocks = {"BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "BLOCK_K": bk}
    common = {
        **blocks,
        "TMA": plan.use_tma,
        "PRECISION": plan.precision,
        "UPCAST": plan.upcast,
        "IN_PARTS": plan.in_parts,
    }
    h_tiles, w_tiles = operand(hidden, plan.block_m, plan), source if gather else operand(source, plan.block_n, plan)
    by_row, by_col = descriptor(scratch, plan.block_m, bk, plan), descriptor(scratch, bk, plan.block_n, plan)
    w_rows = source if gather else descriptor(source, bk, bd, plan)
    h_rows = descriptor(hidden, bk, wd, plan)
    grad_hidden = torch.empty_like(hidden) if need_hidden else hidden.new_empty(0)
    chunks = triton.cdiv(d, bd)

    if not need_weight:
        grad_weight = weight.new_empty(0)
    else:
        grad_weight = source if in_place else torch.empty_like(weight, memory_format=torch.contiguous_format)

    flags = {"HAS_BIAS": saved.bias is not None, "HAS_SCALE": logit_scale != 1.0, "HAS_SOFTCAP": softcap > 0}
    per_token = (order.labels, saved.lse, grad_lse, grad_label)
    rest = {**flags, **plan.rest}

    def compute_tiles(number: int, h: Any, w: Any, rows_of: Tensor, **how: bool) -> None:
        _kept_tiles_kernel[(min(plan.programs, rows * cols),)](
            h, w, saved.bias, order.order, *per_token, kept.tiles, kept.pass_start, kept.pass_block, kept.aside, scratch, number,
            n, rows, v, d, hidden.stride(0), rows_of.stride(0), logit_scale, softcap or 1.0, **flags, PASSES=passes, **how,
            TMA=plan.use_tma, PRECISION=plan.precision, UPCAST=plan.upcast, BLOCK_M=plan.block_m, BLOCK_N=plan.block_n,
            BLOCK_K=plan.block_k, num_warps=plan.tile_warps, num_stages=plan.num_stages,
        )  # fmt: skip

    def multiply_weight(number: int, wait: bool) -> None:
        _weight_gradient_kernel[(min(plan.programs, cols * triton.cdiv(d, wd)),)](
            by_col, h_rows, order.order, kept.tile_rows, kept.start, kept.pass_block, kept.pass_start, kept.aside, spread,
            leans, *(lean or (None, None)), grad_weight, number, n, v, d, hidden.stride(0), WAIT=wait, LEANS=lean is not None,
            DIRECTIONS=DIRECTIONS.value, BLOCK_D=wd, **common, num_warps=plan.weight_warps, num_stages=plan.weight_stages,
        )  # fmt: skip

    for number in range(launched if need_hidden or not in_place else 0):
        compute_tiles(number, h_tiles, w_tiles, source, GATHER=gather, AGAIN=False)
        if need_hidden:
            _hidden_gradient_kernel[(rows * chunks,)](
                by_row, w_rows, order.order, kept.row_tiles, kept.row_pass, kept.row_order, total, order.tokens,
                grad_hidden, number, n, rows, cols, v, d, source.stride(0), PASSES=passes, GATHER=gather, BLOCK_D=bd, **common,
                num_warps=plan.sparse_warps, num_stages=plan.hidden_stages,
            )  # fmt: skip
        if need_weight and (waits or not in_place):
            multiply_weight(number, waits)
    if launched < passes and need_hidden:
        _rest_hidden_kernel[(rows * triton.cdiv(d, plan.rest["BLOCK_D"]),)](
            hidden, source, saved.bias, order.order, *per_token, kept.row_tiles, kept.row_pass, total, order.tokens,
            grad_hidden, launched, n, cols, v, d, hidden.stride(0), source.stride(0), logit_scale, softcap or 1.0,
            PASSES=passes, GATHER=gather, **rest,
        )  # fmt: skip
    # From here on nobody needs the rows in order. What waits lies where those of its own columns were, and nothing may be
    # written to its place before it has moved.
    for back in (False, True) if waits else ():
        _aside_kernel[(cols, triton.cdiv(d, 128))](
            grad_weight, order.order, scratch, kept.pass_block, kept.pass_start, kept.aside, v, d,
            PASSES=passes, BACK=back, BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, BLOCK_D=128,
        )  # fmt: skip
    # The tiles of the last pass that had any are still there; where the gradients from those before did not find room behind
    # them, they are computed once more.
    for number in reversed(range(launched if in_place else 0)):
        compute_tiles(number, h_tiles, weight, weight, GATHER=True, AGAIN=need_hidden)
        multiply_weight(number, False)
    if launched < passes and need_weight:
        _rest_weight_kernel[(min(plan.programs, cols * triton.cdiv(d, plan.rest["BLOCK_D"])),)](
            hidden, weight, saved.bias, order.order, *per_token, kept.tile_rows, kept.start, kept.pass_block, spread, leans,
            *(lean or (None, None)), grad_weight, launched, n, cols, v, d, hidden.stride(0), weight.stride(0), logit_scale,
            softcap or 1.0, LEANS=lean is not None, DIRECTIONS=DIRECTIONS.value, **rest,
        )  # fmt: skip
    for name, error in errors.items():
        if error is not None:
            of = grad_weight if "weight" in name else grad_hidden
            errors[name] = error / torch.linalg.vector_norm(of, dtype=torch.float32)
    return grad_hidden, grad_weight, Report(count, rows * cols, dropped, n, tau, **errors)


def _logits_of(saved: Filtered, weight: Tensor, sampled: Tensor) -> Tensor:
    """h Wᵀ of some rows, [S, V] float32 in the order of columns."""
    hidden = saved.hidden.index_select(0, sampled)
    z = torch.empty((len(sampled), weight.shape[0]), device=hidden.device)
    if saved.weight is not None:
        multiply_add(z, hidden, saved.weight.t(), first=True)
        return z
    multiply_add(z, hidden, weight.t(), first=True)
    return z.index_select(1, saved.order.order[: weight.shape[0]])


def _times_weight(saved: Filtered, weight: Tensor, rows: Tensor) -> Tensor:
    """``rows`` [S, V] in the order of columns, times the weight: [S, D] float32."""
    product = torch.empty((len(rows), weight.shape[1]), device=rows.device)
    if saved.weight is None:
        rows = rows.index_select(1, saved.vocabulary.rank)
    multiply_add(product, rows, weight if saved.weight is None else saved.weight, first=True)
    return product


def _hidden_error(
    saved: Filtered,
    weight: Tensor,  # [V, D]
    grad_lse: Tensor,  # [N]
    logit_scale: float,
    softcap: float,
    kept: Kept,
    mass: Mass,
    tilt: Tensor | None,  # [D, D]
) -> Tensor:
    """The norm of what the filter leaves out of the gradient of the hidden states, estimated from some tokens; a scalar."""
    n, plan = saved.hidden.shape[0], saved.plan
    of_token = token_energy(
        saved.tile_lse, saved.tile_ratio, kept.place, saved.lse, saved.order.labels, weight.shape[0], plan.block_m
    )
    sampled, stands_for = sample(of_token, saved.layout.sampled, n, 1)
    left_out = residual(
        _logits_of(saved, weight, sampled), sampled, saved.bias, saved.lse, saved.order.labels, kept.place, mass.rows, grad_lse,
        saved.hidden.dtype, logit_scale, softcap, plan.block_m, plan.block_n,
    )  # fmt: skip
    wrong = _times_weight(saved, weight, left_out)
    if tilt is not None:
        some = tilted_rows(saved.hidden.index_select(0, sampled), mass.of_token.index_select(1, sampled), logit_scale)
        multiply_add(wrong, -some, tilt, first=False)
    return (wrong.square().sum(1) * stands_for).sum().sqrt()


def _weight_error(
    saved: Filtered,
    weight: Tensor,  # [V, D]
    grad_lse: Tensor,  # [N]
    logit_scale: float,
    softcap: float,
    kept: Kept,
    mass: Mass,
    lean: Leaning | None,
) -> Tensor:
    """Likewise of the gradient of the weight, from some of its rows."""
    (n, d), v, plan = saved.hidden.shape, weight.shape[0], saved.plan
    # no more memory than the sampled tokens take
    count = max(FEWEST_SAMPLED, min(SAMPLED_COLUMNS, saved.layout.sampled * v // n))
    of_columns = torch.where(kept.place < 0, kept.energy, 0.0).sum(1)  # [T]
    sampled, stands_for = sample(of_columns, count, v, plan.block_n)
    if saved.weight is None:
        some = weight.index_select(0, saved.order.order[sampled])
    else:
        some = saved.weight.index_select(0, sampled)
    z = torch.empty((n, count), device=some.device)
    multiply_add(z, saved.hidden, some.t(), first=True)
    left_out = column_residual(
        z, sampled, saved.bias, saved.lse, saved.order.labels, kept.place, mass.rows, grad_lse, some.dtype,
        logit_scale, softcap, plan.block_m, plan.block_n, v,
    )  # fmt: skip
    wrong = torch.empty((count, d), device=some.device)
    multiply_add(wrong, left_out.t(), saved.hidden, first=True)
    if lean is not None:
        block = sampled // plan.block_n
        width = (v - block * plan.block_n).clamp_max(plan.block_n)
        factor = mass.leaves.sum(1)[block] * (-logit_scale / width)
        multiply_add(wrong, (lean.along[sampled] * factor[:, None]).to(some.dtype), lean.back, first=False)
    return (wrong.square().sum(1) * stands_for).sum().sqrt()


def _rounding_errors(
    saved: Filtered, weight: Tensor, grad_lse: Tensor, grad_label: Tensor, logit_scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """The norms of what logits rounded to the inputs' dtype change in the gradients of hidden states and weight; scalars.

    Estimated from some tokens. Rounding moves p by p (δ − Σ p δ), δ independent for each logit, which makes (E + E² − 2 Σ p³) δ²
    of E = Σ p²: E (1 − √E)² where one entry has most of the probability, E (1 − E) where several share it evenly. Tokens are
    drawn by the geometric mean of the two. Rounding errors of different tokens are taken for independent, so their outer
    products with the hidden states add up by their squares; were they not, a loss on full logits would be further off.
    """
    (n, _), v, size = saved.hidden.shape, weight.shape[0], saved.layout.sampled
    energy = token_energy(saved.tile_lse, saved.tile_ratio, None, saved.lse, saved.order.labels, v, saved.plan.block_m)
    energy = energy.clamp_max(1.0)
    likely = energy * (1.0 - energy.sqrt()) * (1.0 - energy).sqrt()
    places, stands_for = sample(likely + 0.1 * likely.mean(), min(n, ROUNDINGS * size), n, 1)
    of_hidden, of_weight = torch.zeros((2,), device=weight.device).unbind()
    for start in range(0, len(places), size):
        sampled, stand = places[start : start + size], stands_for[start : start + size]
        moved, squares = rounding(
            _logits_of(saved, weight, sampled), sampled, saved.bias, saved.lse, saved.order.labels, grad_lse, grad_label,
            weight.dtype, logit_scale, softcap,
        )  # fmt: skip
        lengths = saved.hidden.index_select(0, sampled).float().square().sum(1)
        of_hidden = of_hidden + (_times_weight(saved, weight, moved).square().sum(1) * stand).sum()
        of_weight = of_weight + (squares * lengths * stand).sum()
        del moved  # the next ones take its memory
    return of_hidden.sqrt(), of_weight.sqrt()


def plan_and_layout(
    hidden: Tensor, weight: Tensor, softcap: float, need_weight: bool, budget: int
) -> tuple[Plan, Layout] | None:
    """How the filter would run for these inputs, or None where the budget does not allow it."""
    plan = filter_plan(hidden, weight)
    (n, d), v = hidden.shape, weight.shape[0]
    layout = make_layout(n, d, v, hidden.element_size(), softcap > 0, need_weight, plan, budget)
    return None if layout is None else (plan, layout)
