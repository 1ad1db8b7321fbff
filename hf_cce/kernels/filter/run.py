"""Forward and backward pass of a filtered loss.

Forward leaves statistics of tiles. Backward chooses the tiles to keep, adds what the dropped tiles leave by two products with
column blocks in place of columns, and computes and multiplies the kept tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_cce.kernels.filter.corrections import (
    WeightCorrection,
    dropped_covariance,
    make_weight_correction,
    mass_weighted_hidden,
)
from hf_cce.kernels.filter.error import estimate_errors, relative_errors
from hf_cce.kernels.filter.order import Vocabulary, permute_rows, sort_tokens, sort_vocabulary
from hf_cce.kernels.filter.select import DroppedMass, Kept, dropped_mass, select
from hf_cce.kernels.filter.sparse import DroppedParts, multiply_kept
from hf_cce.kernels.filter.workspace import BackwardRequest, FilterReport, SavedForward, Workspace, plan_workspace
from hf_cce.kernels.forward import combine, tile_stats
from hf_cce.kernels.inputs import LogitInputs, TileStats
from hf_cce.kernels.labels import LabelLogits, label_logits
from hf_cce.kernels.launch_config import Plan, ceil_div, filter_plan, padded, row_major, specialised
from hf_cce.kernels.loss import token_gradients, total_loss
from hf_cce.kernels.matmul import multiply_add


def filtered_cross_entropy(
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    bias: Tensor | None,  # [V]
    labels: Tensor,  # [N]
    factor: Tensor,  # scalar
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    z_loss: float,
    need_weight: bool,
    memory_budget: int,
    vocabulary: Vocabulary | None,
) -> tuple[Tensor, SavedForward] | None:
    """Return (loss, what ``filtered_gradients`` needs), or None where the budget does not allow the filter."""
    inputs = LogitInputs(hidden, weight, bias, labels, ignore_index, logit_scale, softcap)
    saved = _forward_within(inputs, need_weight, memory_budget, vocabulary, None, None)
    if saved is None:
        return None
    return total_loss(saved.lse, saved.label_logit, None, factor, 0.0, z_loss), saved


def filtered_stats(
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    bias: Tensor | None,  # [V]
    labels: Tensor,  # [N]
    ignore_index: int,
    logit_scale: float,
    softcap: float,  # 0, if the entropy is wanted
    want_entropy: bool,
    want_top1: bool,
    need_weight: bool,
    memory_budget: int,
    vocabulary: Vocabulary | None,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], SavedForward] | None:
    """Return ((lse, label_logit, entropy, is_top1) as of ``logit_stats``, what ``token_filtered_gradients`` needs), or None."""
    n, v = labels.numel(), weight.shape[0]
    entropy = torch.empty(n if want_entropy else 0, device=hidden.device, dtype=torch.float32)
    is_top1 = torch.empty(n if want_top1 else 0, dtype=torch.bool, device=hidden.device)
    statistics = 4 * (want_entropy + want_top1) * ceil_div(v, filter_plan(hidden, weight).block_n) * padded(n)
    inputs = LogitInputs(hidden, weight, bias, labels, ignore_index, logit_scale, softcap)
    saved = _forward_within(
        inputs, need_weight, memory_budget - statistics, vocabulary, entropy if want_entropy else None,
        is_top1 if want_top1 else None,
    )  # fmt: skip
    if saved is None:
        return None
    of_rows, token_perm = (saved.lse, saved.label_logit, entropy, is_top1), saved.order.token_perm
    lse, label_logit, entropy, is_top1 = (
        torch.empty_like(x).index_copy_(0, token_perm, x) if x.numel() else x for x in of_rows
    )
    return (lse, label_logit, entropy, is_top1), saved


def filtered_gradients(
    saved: SavedForward,
    grad: Tensor,  # scalar
    factor: Tensor,  # scalar
    weight: Tensor,  # [V, D]
    tau: Tensor,  # scalar
    logit_scale: float,
    softcap: float,
    z_loss: float,
    *how: Any,  # as in token_filtered_gradients
) -> tuple[Tensor | None, Tensor | None, FilterReport]:
    """``token_filtered_gradients`` of a scalar loss."""
    vectors = token_gradients(grad, factor, saved.lse, 0.0, z_loss)[:2]
    return token_filtered_gradients(saved, *vectors, weight, tau, logit_scale, softcap, *how)


def token_filtered_gradients(
    saved: SavedForward,
    grad_lse: Tensor,  # [N] in the order of ``saved.order.token_perm``, like the next
    grad_label: Tensor,
    weight: Tensor,  # [V, D]
    tau: Tensor,  # scalar
    logit_scale: float,
    softcap: float,
    need_hidden: bool,
    need_weight: bool,
    measure: bool,
    unfiltered: Callable[[], Sequence[Tensor | None]] | None = None,
    next_tau: Callable[[FilterReport], Tensor | None] = lambda report: None,
) -> tuple[Tensor | None, Tensor | None, FilterReport]:
    """Return (dh, dW, report), up to what ``tau`` lets the filter drop; empty where not needed. Consumes ``saved``.

    With ``unfiltered``, which returns exact gradients, those are returned and only the report is the filter's: see ``probe``.
    """
    weight = row_major(weight)
    request = BackwardRequest(grad_lse, grad_label, tau, need_hidden, need_weight, measure)
    if unfiltered is None:
        return backward(saved, weight, request)
    report = probe(saved, weight, request, next_tau)
    del request, grad_lse, grad_label  # their memory, like that of ``saved``, is for the gradients
    grad_hidden, grad_weight, *_ = unfiltered()
    return grad_hidden, grad_weight, relative_errors(report, grad_hidden, grad_weight)


def _forward_within(
    inputs: LogitInputs,
    need_weight: bool,
    memory_budget: int,
    vocabulary: Vocabulary | None,
    entropy: Tensor | None,  # [N] in the order of rows, written, like the next
    is_top1: Tensor | None,
) -> SavedForward | None:
    if not inputs.labels.numel():
        return None
    chosen = plan_and_workspace(inputs.hidden, inputs.weight, inputs.softcap, need_weight, memory_budget)
    if chosen is None:
        return None
    return forward(inputs.readable(), *chosen, vocabulary, entropy, is_top1)


def plan_and_workspace(
    hidden: Tensor, weight: Tensor, softcap: float, need_weight: bool, budget: int
) -> tuple[Plan, Workspace] | None:
    """Return how the filter would run for these inputs, or None where the budget does not allow it."""
    plan = filter_plan(hidden, weight)
    (n, d), v = hidden.shape, weight.shape[0]
    workspace = plan_workspace(n, d, v, hidden.dtype, softcap > 0, need_weight, plan, budget)
    return None if workspace is None else (plan, workspace)


def forward(
    inputs: LogitInputs,
    plan: Plan,
    workspace: Workspace,
    vocabulary: Vocabulary | None,
    entropy: Tensor | None = None,  # [N] in the order of rows, written, like the next; without a softcap only
    is_top1: Tensor | None = None,
) -> SavedForward:
    """Compute ``lse`` and ``label_logit`` of each token, zero where it is ignored, and the statistics of tiles."""
    weight, n, v = inputs.weight, inputs.labels.numel(), inputs.weight.shape[0]
    cols = ceil_div(v, plan.block_n)
    if vocabulary is None:
        vocabulary = sort_vocabulary(inputs.hidden, weight, inputs.bias, plan.block_n)
    order = sort_tokens(inputs.labels, vocabulary, inputs.ignore_index)
    bias = None if inputs.bias is None else inputs.bias.index_select(0, order.vocab_perm[:v])
    means = weight.new_empty((cols, weight.shape[1]))
    # Padded, so that each begins aligned: Triton would compile another kernel for pointers that are not.
    lse, label_logit = torch.empty((2, padded(n)), device=weight.device, dtype=torch.float32)[:, :n].unbind()
    tile_lse = torch.empty((cols, padded(n)), device=weight.device, dtype=torch.float32)
    tile_ratio = torch.empty((cols, padded(n)), dtype=torch.bfloat16, device=weight.device)
    tile_damping = torch.empty_like(tile_ratio) if inputs.softcap > 0 else None
    expectation, largest = (None if x is None else torch.empty_like(tile_lse) for x in (entropy, is_top1))
    tiles = TileStats(tile_lse, None, expectation, None, largest, tile_ratio, tile_damping)
    of_columns = inputs._replace(labels=order.labels, ignore_index=v)
    if specialised(plan, bias, inputs.softcap, entropy, is_top1):
        # One kernel sorts the hidden states and reads them for the labels' logits. The Hopper kernel needs both.
        hidden = inputs.hidden.new_empty(inputs.hidden.shape)
        label = label_logits(of_columns, plan, plan.block_m, order.vocab_perm, order.token_perm, hidden)
    else:
        hidden, label = inputs.hidden.index_select(0, order.token_perm), LabelLogits(label_logit, None)
    in_order = of_columns._replace(hidden=hidden, bias=bias)
    permuted = of_rows = None
    for first in range(0, v, workspace.slab):
        permuted = of_rows = None  # frees the slab before
        stop, block = min(v, first + workspace.slab), first // plan.block_n
        permuted = permute_rows(weight, order.vocab_perm, first, stop, means, plan.block_n)
        of_slab = TileStats(*(None if x is None else x[block:] for x in tiles))  # type: ignore[arg-type]
        of_rows = in_order._replace(weight=permuted, bias=None if bias is None else bias[first:stop])
        tile_stats(of_rows, of_slab, label, plan, first)
    combine(tiles, label.logit, order.labels, lse, [None, entropy, None, is_top1], v, cols, v)
    return SavedForward(
        order, hidden, permuted if workspace.keep_weight else None, bias, means, lse, label.logit, tile_lse, tile_ratio,
        tile_damping, workspace, plan, vocabulary, inputs.logit_scale, inputs.softcap,
    )  # fmt: skip


class _Choice(NamedTuple):
    """Which tiles are kept, what stands for the others, and how far off that is."""

    kept: Kept
    mass: DroppedMass
    covariance: Tensor | None  # [D, D]
    correction: WeightCorrection | None
    report: FilterReport  # its errors are norms, until ``relative_errors``


def _choose(saved: SavedForward, weight: Tensor, request: BackwardRequest) -> _Choice:
    plan, vocabulary, vocab_perm = saved.plan, saved.vocabulary, saved.order.vocab_perm
    kept = select(saved, request.tau)
    # float16 has no range for the corrections.
    corrected = saved.workspace.corrected and saved.hidden.dtype != torch.float16
    mass = dropped_mass(saved, kept, request.grad_lse, weight.shape[1] if corrected and request.need_hidden else 0)
    covariance, correction = None, None
    if corrected and request.need_hidden:
        if vocabulary.covariance is None:
            vocabulary.covariance = dropped_covariance(weight, vocab_perm, mass.probability.sum(1), plan.block_n)
        covariance = vocabulary.covariance
    if corrected and request.need_weight:
        if vocabulary.weight_correction is None:
            vocabulary.weight_correction = make_weight_correction(
                saved.hidden, weight, vocab_perm, mass.per_token, plan.block_n
            )
        correction = vocabulary.weight_correction
    rows, cols = saved.tile_grid
    report = FilterReport(kept.first_kept[-1], rows * cols, mass.probability, len(saved.hidden), request.tau)
    if request.measure:
        errors = estimate_errors(saved, weight, request, kept, mass, covariance, correction)
        report = report._replace(**vars(errors))
    return _Choice(kept, mass, covariance, correction, report)


def probe(
    saved: SavedForward,
    weight: Tensor,  # [V, D]
    request: BackwardRequest,
    next_tau: Callable[[FilterReport], Tensor | None],
) -> FilterReport:
    """Report what the filter would do, without gradients; ``relative_errors`` completes the report. Consumes ``saved``.

    The first threshold is a guess: if ``next_tau`` finds another from the estimated errors, the report says what that would keep.
    """
    report = _choose(saved, weight, request).report
    better = next_tau(report)
    if better is not None:
        there = _choose(saved, weight, replace(request, tau=better, measure=False)).report
        report = report._replace(kept=there.kept, dropped=there.dropped, tau=better)
    vars(saved).clear()
    return report._replace(dropped=report.dropped.sum())


def backward(
    saved: SavedForward,
    weight: Tensor,  # [V, D]
    request: BackwardRequest,
) -> tuple[Tensor, Tensor, FilterReport]:
    """Return (dh [N, D] in the tokens' own order, dW [V, D], report), empty where not needed. Consumes ``saved``."""
    kept, mass, covariance, correction, report = _choose(saved, weight, request)
    # Kept tiles are written to their memory.
    del saved.tile_lse, saved.tile_ratio, saved.tile_damping
    (n, d), (_, cols) = saved.hidden.shape, saved.tile_grid
    of_hidden = torch.empty((n, d) if request.need_hidden else 0, device=weight.device, dtype=torch.float32)
    if request.need_hidden:
        _add_dropped_to_hidden(of_hidden, saved, mass, covariance)
    of_blocks = torch.empty((cols, d) if request.need_weight else 0, device=weight.device, dtype=torch.float32)
    if request.need_weight:
        multiply_add(of_blocks, mass.per_row, saved.hidden, first=True)
    block_mass = None if correction is None else mass.per_tile.sum(1) * saved.logit_scale
    del mass
    parts = DroppedParts(of_hidden, of_blocks, block_mass, correction)
    grad_hidden, grad_weight = multiply_kept(saved, weight, request, kept, parts)
    return grad_hidden, grad_weight, relative_errors(report, grad_hidden, grad_weight)


def _add_dropped_to_hidden(
    total: Tensor,  # [N, D] float32, written
    saved: SavedForward,
    mass: DroppedMass,  # with D spare rows if there is a covariance
    covariance: Tensor | None,  # [D, D]
) -> None:
    """Write what dropped tiles leave to dh: mass times mean rows, and mass times hidden states times the covariance.

    One product: of two, the second would read and write all of ``total`` once more.
    """
    means = saved.means
    if covariance is not None:
        mass_weighted_hidden(saved.hidden, mass.per_token, saved.logit_scale, mass.stacked[len(means) :])
        means = torch.cat((means, covariance))
    multiply_add(total, mass.stacked.t(), means, first=True)
