"""The scalar loss with the gradient filter: forward leaves the statistics of tiles, backward computes the tiles that matter.

hf_cce.kernels.filter chooses them, hf_cce.kernels.sparse computes and multiplies them. What is dropped enters the gradients by
its mass: two products with the blocks of the vocabulary in place of its entries, 128 times smaller than a dense one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hf_cce.kernels.filter import Kept, Mass, dropped_mass, select
from hf_cce.kernels.filter_error import estimate_errors, relative_errors
from hf_cce.kernels.forward import combine, tile_stats
from hf_cce.kernels.layout import Backward, Filtered, Layout, Report, make_layout
from hf_cce.kernels.order import Vocabulary, permute_rows, sort_tokens, sort_vocabulary
from hf_cce.kernels.plan import (
    Plan,
    ceil_div,
    descriptor,
    filter_plan,
    operand,
    padded,
    specialised,
)
from hf_cce.kernels.products import multiply_add
from hf_cce.kernels.sparse import (
    _hidden_gradient_kernel,
    _kept_tiles_kernel,
    _reorder_rows_kernel,
    _weight_gradient_kernel,
)
from hf_cce.kernels.stored import label_logits
from hf_cce.kernels.tilt import DIRECTIONS, Leaning, covariance, leaning, tilted_rows


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
    entropy: Tensor | None = None,  # [N] in the order of rows, written, like the next
    is_top1: Tensor | None = None,
) -> Filtered:
    """What the backward pass needs, and the loss: ``lse`` and ``label_logit`` of each token, zero where it is ignored.

    ``entropy`` only without a softcap: what the kernel adds up for it is damped where there is one.
    """
    (n, d), v = hidden.shape, weight.shape[0]
    cols = ceil_div(v, plan.block_n)
    if vocabulary is None:
        vocabulary = sort_vocabulary(hidden, weight, bias, plan.block_n)
    order = sort_tokens(labels, vocabulary, ignore_index)
    of_entries = bias
    if bias is not None:
        bias = bias.index_select(0, order.order[:v])
    means = weight.new_empty((cols, d))
    # Each begins aligned whatever the number of tokens, or Triton would compile for both, the second kind in a step to come.
    lse, label_logit = torch.empty((2, padded(n)), device=hidden.device, dtype=torch.float32)[:, :n].unbind()
    tile_lse = torch.empty((cols, padded(n)), device=hidden.device, dtype=torch.float32)
    tile_ratio = torch.empty((cols, padded(n)), dtype=torch.bfloat16, device=hidden.device)
    tile_damping = torch.empty_like(tile_ratio) if softcap > 0 else None
    expectation, largest = (None if x is None else torch.empty_like(tile_lse) for x in (entropy, is_top1))
    live = None
    rows_of_flags = plan.block_m if specialised(plan, bias, softcap, entropy, is_top1) else 0
    if rows_of_flags:
        in_rows = hidden.new_empty((n, d))
        label_logit, live = label_logits(
            hidden, weight, of_entries, order.labels, v, logit_scale, softcap, plan, rows_of_flags, order.order, order.tokens,
            in_rows,
        )  # fmt: skip
        hidden = in_rows
    else:
        hidden = hidden.index_select(0, order.tokens)

    in_order = None
    for first in range(0, v, layout.slab):
        in_order = None  # frees the slab before
        stop, block = min(v, first + layout.slab), first // plan.block_n
        in_order = permute_rows(weight, order.order, first, stop, means, plan.block_n)
        of_tiles = [None if x is None else x[block:] for x in (tile_lse, None, expectation, None, largest)]
        tile_stats(
            hidden, in_order, None if bias is None else bias[first:stop], order.labels, of_tiles, label_logit, first, v,
            logit_scale, softcap, plan, tile_ratio[block:], None if tile_damping is None else tile_damping[block:], None, live,
        )  # fmt: skip
    combine(
        [tile_lse, None, expectation, None, largest], label_logit, order.labels, lse, [None, entropy, None, is_top1], v, cols, v
    )  # fmt: skip
    return Filtered(
        order, hidden, in_order if layout.keep_rows else None, bias, means, lse, label_logit, tile_lse, tile_ratio, tile_damping,
        layout, plan, vocabulary, logit_scale, softcap,
    )  # fmt: skip


class _Choice(NamedTuple):
    """Which tiles are kept, what stands for the others, and how far off that is."""

    kept: Kept
    mass: Mass
    tilt: Tensor | None
    lean: Leaning | None
    report: Report  # its errors are norms, until ``relative_errors``


def _choose(saved: Filtered, weight: Tensor, asked: Backward) -> _Choice:
    hidden, order, layout, plan = saved.hidden, saved.order, saved.layout, saved.plan
    (n, d), v, dtype = hidden.shape, weight.shape[0], hidden.dtype
    kept = select(
        saved.tile_lse, saved.tile_ratio, saved.lse, saved.label_logit, order.labels, asked.tau,
        v, saved.softcap, plan.block_m, plan.block_n, layout.room, layout.passes,
    )  # fmt: skip
    tilted = layout.tilted and dtype != torch.float16  # which has no range for it
    mass = dropped_mass(
        kept, saved.tile_lse, saved.tile_damping, saved.lse, order.labels, asked.grad_lse, v, saved.logit_scale, dtype,
        plan.block_m, d if tilted and asked.need_hidden else 0,
    )  # fmt: skip
    tilt, lean, learnt = None, None, saved.vocabulary
    if tilted:
        if asked.need_hidden and learnt.tilt is None:
            learnt.tilt = covariance(weight, order.order, mass.dropped.sum(1), plan.block_n)
        if asked.need_weight and learnt.leaning is None:
            learnt.leaning = leaning(hidden, weight, order.order, mass.of_token, plan.block_n)
        tilt = learnt.tilt if asked.need_hidden else None
        lean = learnt.leaning if asked.need_weight else None
    tiles = ceil_div(n, plan.block_m) * ceil_div(v, plan.block_n)
    report = Report(kept.start[-1], tiles, mass.dropped, n, asked.tau)
    if asked.measure:
        report = report._replace(**vars(estimate_errors(saved, weight, asked, kept, mass, tilt, lean)))
    return _Choice(kept, mass, tilt, lean, report)


def rehearse(saved: Filtered, weight: Tensor, asked: Backward, moved: Callable[[Report], Tensor | None]) -> Report:
    """What the filter would do; the gradients are left to somebody else, and ``relative_errors`` to be called with them.

    ``moved`` gives the threshold to which the measured errors point, and the report says what would be kept with that one: the
    first threshold of all is a guess. Consumes ``saved``; no memory but a few numbers stays.
    """
    report = _choose(saved, weight, asked).report
    better = moved(report)
    if better is not None:
        there = _choose(saved, weight, replace(asked, tau=better, measure=False)).report
        report = report._replace(kept=there.kept, dropped=there.dropped, tau=better)
    vars(saved).clear()
    return report._replace(dropped=report.dropped.sum())


def _of_dropped(
    total: Tensor,  # [N, D] float32, written
    saved: Filtered,
    mass: Mass,  # with D rows beyond its own if there is a tilt
    tilt: Tensor | None,  # [D, D]
    logit_scale: float,
) -> None:
    """What the dropped tiles leave to the hidden states' gradient, by way of their means and of the tilt.

    One product: of two, the second would read and write all of ``total`` once more.
    """
    means = saved.means
    if tilt is not None:
        cols = len(means)
        tilted_rows(saved.hidden, mass.of_token, logit_scale, mass.every[cols:])
        # Copied here, the covariance is there twice only for a moment. (``cat`` of tensors without memory imports a second's
        # worth of modules.)
        means = means.new_empty((cols + len(tilt), len(tilt)))
        means[:cols].copy_(saved.means)
        means[cols:].copy_(tilt)
    multiply_add(total, mass.every.t(), means, first=True)


def backward(saved: Filtered, weight: Tensor, asked: Backward) -> tuple[Tensor, Tensor, Report]:
    """(gradient of hidden [N, D] in the tokens' own order, of weight [V, D], report), empty where not needed.

    Consumes ``saved``. All passes are launched; one without tiles costs its launches and no more.
    """
    hidden, order, layout, plan = saved.hidden, saved.order, saved.layout, saved.plan
    (n, d), v = hidden.shape, weight.shape[0]
    need_hidden, need_weight, logit_scale, softcap = (
        asked.need_hidden,
        asked.need_weight,
        saved.logit_scale,
        saved.softcap,
    )
    rows, cols, passes = ceil_div(n, plan.block_m), ceil_div(v, plan.block_n), layout.passes

    gather = saved.weight is None
    # The rows in order, where the layout kept them, lie in the memory of the gradient that will overwrite them.
    in_place = need_weight and not gather
    kept, mass, tilt, lean, report = _choose(saved, weight, asked)
    # Their memory is what the kept tiles are written to.
    del saved.tile_lse, saved.tile_ratio, saved.tile_damping
    total = torch.empty((n, d) if need_hidden else 0, device=hidden.device, dtype=torch.float32)
    if need_hidden:
        _of_dropped(total, saved, mass, tilt, logit_scale)
    spread = torch.empty((cols, d) if need_weight else 0, device=hidden.device, dtype=torch.float32)
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
    chunks = ceil_div(d, bd)

    if not need_weight:
        grad_weight = weight.new_empty(0)
    else:
        grad_weight = source if in_place else torch.empty_like(weight, memory_format=torch.contiguous_format)

    flags = {"HAS_BIAS": saved.bias is not None, "HAS_SCALE": logit_scale != 1.0, "HAS_SOFTCAP": softcap > 0}
    per_token = (order.labels, saved.lse, asked.grad_lse, asked.grad_label)

    for number in range(passes):
        # A flat loop takes registers, of which Triton 3.9 has none left; it was measured with the version that specialises.
        _kept_tiles_kernel[(min(plan.programs, rows * cols),)](
            h_tiles, w_tiles, saved.bias, order.order, *per_token, kept.tiles, kept.pass_start, scratch, number,
            n, rows, v, d, hidden.stride(0), source.stride(0), logit_scale, softcap or 1.0, **flags, GATHER=gather,
            FLATTEN=plan.specialised, TMA=plan.use_tma, PRECISION=plan.precision, UPCAST=plan.upcast, BLOCK_M=plan.block_m,
            BLOCK_N=plan.block_n, BLOCK_K=plan.block_k, num_warps=plan.tile_warps, num_stages=plan.num_stages,
        )  # fmt: skip
        if need_hidden:
            _hidden_gradient_kernel[(rows * chunks,)](
                by_row, w_rows, order.order, kept.row_tiles, kept.row_pass, kept.row_order, total, order.tokens,
                grad_hidden, number, n, rows, cols, v, d, source.stride(0), PASSES=passes, GATHER=gather, BLOCK_D=bd,
                **common, num_warps=plan.sparse_warps, num_stages=plan.hidden_stages,
            )  # fmt: skip
        if need_weight:
            _weight_gradient_kernel[(min(plan.programs, cols * ceil_div(d, wd)),)](
                by_col, h_rows, order.order, kept.tile_rows, kept.start, kept.pass_block, kept.pass_start, spread,
                leans, *(lean or (None, None)), grad_weight, number, n, v, d, hidden.stride(0),
                IN_PLACE=in_place and passes > 1, LEANS=lean is not None, DIRECTIONS=DIRECTIONS.value, BLOCK_D=wd, **common,
                num_warps=plan.weight_warps, num_stages=plan.weight_stages,
            )  # fmt: skip
    if in_place and passes > 1:
        _reorder_rows(grad_weight, order.order, scratch, kept.pass_block, plan.block_n)
    return grad_hidden, grad_weight, relative_errors(report, grad_hidden, grad_weight)


def _reorder_rows(gradient: Tensor, order: Tensor, scratch: Tensor, pass_block: Tensor, block_n: int) -> None:
    """Move rows of ``gradient`` [V, D] from the order of columns to their entries, a slice of D at a time, through ``scratch``.

    Does nothing where one pass had all tiles: then they are at their entries already.
    """
    v, d = gradient.shape
    width = min(d, scratch.numel() // v)
    if width > 16:
        width -= width % 16  # rows that begin aligned
    for first in range(0, d, width):
        stop = min(d, first + width)
        for back in (False, True):
            _reorder_rows_kernel[(ceil_div(v, block_n), ceil_div(stop - first, 128))](
                gradient, order, scratch, pass_block, first, stop - first, v, d, BACK=back, BLOCK_N=block_n, BLOCK_D=128,
            )  # fmt: skip


def plan_and_layout(
    hidden: Tensor, weight: Tensor, softcap: float, need_weight: bool, budget: int
) -> tuple[Plan, Layout] | None:
    """How the filter would run for these inputs, or None where the budget does not allow it."""
    plan = filter_plan(hidden, weight)
    (n, d), v = hidden.shape, weight.shape[0]
    layout = make_layout(n, d, v, hidden.element_size(), softcap > 0, need_weight, plan, budget)
    return None if layout is None else (plan, layout)
