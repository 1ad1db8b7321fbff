"""Forward and backward pass of a filtered loss.

The forward pass saves statistics of the tiles. The backward pass chooses the tiles to keep, computes and multiplies them, and
approximates the contribution of the dropped tiles by two products over column blocks instead of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hf_cce.kernels.filter.corrections import dropped_covariance, make_weight_correction
from hf_cce.kernels.filter.error import estimate_errors, relative_errors
from hf_cce.kernels.filter.order import Vocabulary, gather_rows, sort_tokens, sort_vocabulary
from hf_cce.kernels.filter.select import Selection, dropped_mass, select
from hf_cce.kernels.filter.sparse import multiply_kept
from hf_cce.kernels.filter.workspace import BackwardRequest, FilterReport, SavedForward, plan_workspace
from hf_cce.kernels.forward import combine, tile_stats
from hf_cce.kernels.inputs import LogitInputs, TileStats
from hf_cce.kernels.labels import LabelLogits, label_logits
from hf_cce.kernels.launch_config import ceil_div, filter_plan, padded, row_major, uses_hopper
from hf_cce.matmul import multiply
from hf_cce.spec import Inputs, LogitStats, LossSpec, WantedStats


def filtered_stats(
    x: Inputs, spec: LossSpec, wanted: WantedStats, vocabulary: Vocabulary | None
) -> tuple[LogitStats, SavedForward] | None:
    """Return ``logit_stats`` except the mean and log_sum_sq, and what ``filtered_forward`` returns.

    The entropy is supported only without a softcap.
    """
    n, device = x.labels.numel(), x.hidden.device
    entropy = torch.empty(n if wanted.entropy else 0, device=device, dtype=torch.float32)
    is_top1 = torch.empty(n if wanted.top1 else 0, dtype=torch.bool, device=device)
    saved = filtered_forward(x, spec, vocabulary, entropy if wanted.entropy else None, is_top1 if wanted.top1 else None)
    if saved is None:
        return None
    by_row, token_perm = (saved.lse, saved.label_logit, entropy, is_top1), saved.token_perm
    lse, label_logit, entropy, is_top1 = (
        torch.empty_like(stat).index_copy_(0, token_perm, stat) if stat.numel() else stat for stat in by_row
    )
    empty = lse.new_empty(0)
    return LogitStats(lse, label_logit, empty, entropy, empty, is_top1), saved


def filtered_gradients(
    saved: SavedForward,
    weight: Tensor,  # [V, D]
    request: BackwardRequest,
    unfiltered: Callable[[], Sequence[Tensor | None]] | None = None,
    next_tau: Callable[[FilterReport], Tensor | None] = lambda report: None,
) -> tuple[Tensor | None, Tensor | None, FilterReport]:
    """Return (dh, dW, report), filtered with the threshold ``request.tau``; empty if not needed. Consumes ``saved``.

    If ``unfiltered`` is given, return the exact gradients it computes, and a report of what the filter would do (``_probe``).
    """
    weight = row_major(weight)
    if unfiltered is None:
        grad_hidden, grad_weight, report = _backward(saved, weight, request)
    else:
        report = _probe(saved, weight, request, next_tau)
        grad_hidden, grad_weight, *_ = unfiltered()
    return grad_hidden, grad_weight, relative_errors(report, grad_hidden, grad_weight)


def filtered_forward(
    x: Inputs,
    spec: LossSpec,
    vocabulary: Vocabulary | None,
    entropy: Tensor | None = None,  # [N], written in the order of rows
    is_top1: Tensor | None = None,  # [N], likewise
) -> SavedForward | None:
    """Return tensors saved for ``filtered_gradients``, or None if the budget is too small for the filter."""
    inputs, plan = LogitInputs.from_spec(x, spec), filter_plan(x.hidden, x.weight)
    (n, d, v, _), more_statistics = inputs.shape, (entropy is not None) + (is_top1 is not None)
    cols = ceil_div(v, plan.block_n)
    budget = spec.memory_budget - 4 * more_statistics * cols * padded(n)
    workspace = plan_workspace(inputs.shape, plan, spec.softcap > 0, spec.needs[1], budget) if n else None
    if workspace is None:
        return None
    weight, device = inputs.weight, x.hidden.device
    if vocabulary is None:
        vocabulary = sort_vocabulary(inputs.hidden, weight, inputs.bias, plan.block_n)
    vocab_perm = vocabulary.vocab_perm
    token_perm, labels = sort_tokens(inputs.labels, vocabulary, spec.ignore_index)
    bias = None if inputs.bias is None else inputs.bias.index_select(0, vocab_perm[:v])
    means = weight.new_empty((cols, d))
    # Padded so that each starts aligned: for unaligned pointers, Triton would compile another version of the kernel.
    lse, label_logit, rounding = torch.empty((3, padded(n)), device=device, dtype=torch.float32)[:, :n].unbind()
    tile_lse = torch.empty((cols, padded(n)), device=device, dtype=torch.float32)
    tile_ratio = torch.empty((cols, padded(n)), dtype=torch.bfloat16, device=device)
    tile_damping = torch.empty_like(tile_ratio) if spec.softcap > 0 else None
    expectation, z_max = (None if wanted is None else torch.empty_like(tile_lse) for wanted in (entropy, is_top1))
    tiles = TileStats(tile_lse, None, expectation, None, z_max, tile_ratio, tile_damping)
    column_inputs = inputs._replace(labels=labels, ignore_index=v)  # labels are columns
    if uses_hopper(plan, bias, spec.softcap, more_statistics > 0):
        # The Hopper kernel needs sorted hidden states and label logits. One kernel computes both.
        hidden = inputs.hidden.new_empty(inputs.hidden.shape)
        label = label_logits(column_inputs, plan, plan.block_m, vocab_perm, token_perm, hidden)
    else:
        hidden, label = inputs.hidden.index_select(0, token_perm), LabelLogits(label_logit)
    sorted_inputs = column_inputs._replace(hidden=hidden, bias=bias)
    sorted_weight = slab = None
    for first in range(0, v, workspace.slab):
        sorted_weight = slab = None  # free the previous slab
        stop, block = min(v, first + workspace.slab), first // plan.block_n
        sorted_weight = gather_rows(weight, vocab_perm, first, stop, plan.block_n, means)
        slab = sorted_inputs._replace(weight=sorted_weight, bias=None if bias is None else bias[first:stop])
        slab_tiles = TileStats(*(None if stat is None else stat[block:] for stat in tiles))  # type: ignore[arg-type]
        tile_stats(slab, slab_tiles, label, plan, first)
    combine(tiles, sorted_inputs, label.logit, lse, [None, entropy, None, is_top1, rounding])
    return SavedForward(
        token_perm, labels, hidden, sorted_weight if workspace.keep_weight else None, bias, means, lse, label.logit, rounding,
        tile_lse, tile_ratio, tile_damping, workspace, plan, vocabulary, spec.logit_scale, spec.softcap,
    )  # fmt: skip


def _select_tiles(saved: SavedForward, weight: Tensor, request: BackwardRequest) -> tuple[Selection, FilterReport]:
    """Choose the tiles to keep; the report's errors are absolute until ``relative_errors`` divides them."""
    vocabulary, block_n = saved.vocabulary, saved.plan.block_n
    corrected = saved.workspace.corrected
    correct_hidden, correct_weight = corrected and request.need_hidden, corrected and request.need_weight
    kept = select(saved, request.tau, request.by_rounding)
    mass = dropped_mass(saved, kept, request.grad_lse, with_hidden=correct_hidden)
    if correct_hidden and vocabulary.covariance is None:
        vocabulary.covariance = dropped_covariance(weight, vocabulary.vocab_perm, mass.probability, block_n)
    if correct_weight and vocabulary.weight_correction is None:
        vocabulary.weight_correction = make_weight_correction(
            saved.hidden, weight, vocabulary.vocab_perm, saved.means, mass.per_token, block_n
        )
    covariance = vocabulary.covariance if correct_hidden else None
    selection = Selection(kept, mass, covariance, vocabulary.weight_correction if correct_weight else None)
    rows, cols = saved.workspace.tile_grid
    report = FilterReport(kept.first_kept[-1], rows * cols, mass.probability, saved.hidden.shape[0], request.tau)
    if request.measure:
        report = report._replace(**estimate_errors(saved, weight, request, selection))
    return selection, report


def _probe(
    saved: SavedForward,
    weight: Tensor,  # [V, D]
    request: BackwardRequest,
    next_tau: Callable[[FilterReport], Tensor | None],
) -> FilterReport:
    """Report what the filter would do, without gradients; ``relative_errors`` completes the report. Consumes ``saved``.

    The first threshold is a guess. If ``next_tau`` derives another one from the estimated errors, report what that would keep.
    """
    report = _select_tiles(saved, weight, request)[1]  # frees the selection
    tau = next_tau(report)
    if tau is not None:
        report_at_tau = _select_tiles(saved, weight, replace(request, tau=tau, measure=False))[1]
        report = report._replace(kept=report_at_tau.kept, dropped=report_at_tau.dropped, tau=tau)
    vars(saved).clear()
    return report._replace(dropped=report.dropped.sum())


def _backward(
    saved: SavedForward, weight: Tensor, request: BackwardRequest
) -> tuple[Tensor | None, Tensor | None, FilterReport]:
    """Return (dh [N, D] in the original order of tokens, dW [V, D], report with absolute errors). Consumes ``saved``."""
    (kept, mass, covariance, correction), report = _select_tiles(saved, weight, request)
    # Free memory for the kept tiles.
    del saved.tile_lse, saved.tile_ratio, saved.tile_damping
    dropped_hidden = dropped_blocks = None
    if request.need_hidden:
        means = saved.means if covariance is None else torch.cat((saved.means, covariance))
        dropped_hidden = multiply(mass.for_hidden.t(), means)
        del means
    if request.need_weight:
        dropped_blocks = multiply(mass.per_row, saved.hidden)
    block_mass = None if correction is None else mass.per_block * saved.logit_scale
    del mass
    return *multiply_kept(saved, weight, request, kept, dropped_hidden, dropped_blocks, block_mass, correction), report
