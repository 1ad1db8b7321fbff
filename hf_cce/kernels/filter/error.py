"""Estimates of the error of filtered gradients, from a sample of tokens and of rows of dW.

Two errors are estimated, each for dh and for dW: that of dropping tiles, and that of a loss on full logits from rounding them to
the dtype of the inputs. ``FilterState`` adjusts the threshold until the first is a fixed share of the second.

This is plain PyTorch, since few steps are measured. Nothing synchronizes, and results are bitwise reproducible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_cce.kernels.filter.corrections import mass_weighted
from hf_cce.kernels.filter.select import Selection
from hf_cce.kernels.filter.workspace import MEASURED_TOKENS, BackwardRequest, FilterReport, SavedForward
from hf_cce.matmul import multiply, multiply_add

ALL = slice(None)
# Rounding errors need a larger sample than filter errors, because a few tokens cause most of them.
ROUNDED_TOKENS = 4 * MEASURED_TOKENS
MEASURED_ROWS = 256  # rows of dW


def estimate_errors(
    saved: SavedForward, weight: Tensor, request: BackwardRequest, selection: Selection
) -> dict[str, Any]:
    """Estimate both errors of the gradients that ``request`` asks for, before the gradients are computed.

    Returns:
        Frobenius norms of the errors, as scalar tensors on the device, by field names of ``FilterReport``.
    """
    step = _Step(saved, weight, request, selection)
    rounding_hidden, rounding_weight = _rounding_errors(step)
    errors: dict[str, Any] = {}
    if request.need_hidden:
        errors |= {"error": _hidden_error(step), "rounding_error": rounding_hidden}
    if request.need_weight:
        errors |= {"weight_error": _weight_error(step), "rounding_weight_error": rounding_weight}
    return errors


def relative_errors(report: FilterReport, grad_hidden: Tensor | None, grad_weight: Tensor | None) -> FilterReport:
    """Return ``report`` with each error divided by the norm of its gradient."""
    pairs = (("error", "rounding_error"), ("weight_error", "rounding_weight_error"))
    for gradient, names in zip((grad_hidden, grad_weight), pairs, strict=True):
        if gradient is not None and getattr(report, names[0]) is not None:
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
            report = report._replace(**{name: getattr(report, name) / norm for name in names})
    return report


def sample(weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Select ``count`` indices by deterministic systematic sampling, with frequencies proportional to ``weights`` [M].

    Returns:
        ``indices`` [count] in ascending order, and ``factors`` [count], float32. For any f [M] that is zero wherever ``weights``
        is zero, ``(factors * f[indices]).sum()`` is an estimate of ``f.sum()``.
    """
    if count >= len(weights):
        return torch.arange(len(weights), device=weights.device), torch.ones_like(weights)
    total = weights.sum(dtype=torch.float64)
    share = weights / total
    # Integers, because parallel prefix sums of floats are not bitwise reproducible.
    upto = (share * 2.0**48).nan_to_num(0.0, 0.0, 0.0).long().cumsum(0)
    targets = (2 * torch.arange(count, device=weights.device) + 1) * upto[-1] // (2 * count)
    indices = torch.searchsorted(upto, targets, right=True).clamp_max(len(weights) - 1)
    factors = torch.where(total == 0, 0.0, 1.0 / (count * share[indices]))
    return indices, factors.float()


def _batches(weights: Tensor, count: int, at_once: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the result of ``sample``, at most ``at_once`` indices at a time."""
    indices, factors = sample(weights, count)
    return zip(indices.split(at_once), factors.split(at_once), strict=True)


@dataclass(frozen=True)
class _Step:
    """Filtered step whose error is estimated.

    In its methods, ``tokens`` are indices of rows, ``entries`` are vocabulary entries, and either may be ``ALL``.
    """

    saved: SavedForward
    weight: Tensor  # [V, D]
    request: BackwardRequest
    selection: Selection

    @property
    def rows_at_once(self) -> int:
        """Number of vocabulary entries or tiles, each with one value per token, that fit in the memory for logits."""
        return max(1, self.saved.workspace.measured_at_once * len(self.weight) // len(self.saved.hidden))

    @property
    def valid(self) -> Tensor:
        """Mask [N] of the tokens whose label is not ignored."""
        return self.saved.labels < len(self.weight)

    @property
    def dropped(self) -> Tensor:
        """Mask [T, row blocks] of the dropped tiles."""
        return self.selection.kept.kept_slot < 0

    @property
    def row_blocks(self) -> Tensor:
        """Row block of each token, [N]."""
        return torch.arange(len(self.saved.hidden), device=self.weight.device) // self.saved.plan.block_m

    def width(self, tiles: Tensor) -> Tensor:
        """Return the number of columns of each tile; the last one may be narrower."""
        block_n = self.saved.plan.block_n
        return (len(self.weight) - tiles * block_n).clamp_max(block_n)

    def columns(self, entries: Tensor | slice) -> Tensor:
        """Return the columns of some vocabulary entries, int64."""
        return self.saved.vocabulary.inv_vocab_perm[entries].long()

    def logits(self, tokens: Tensor | slice, entries: Tensor | slice) -> Tensor:
        """Return h Wᵀ + b of some tokens and vocabulary entries, [R, C] float32."""
        z = multiply(self.saved.hidden[tokens], self.weight[entries].t())
        if self.saved.bias is not None:
            z += self.saved.bias[self.columns(entries)]
        return z

    def softmax_gradient(self, z: Tensor, tokens: Tensor | slice, lse: Tensor | None) -> tuple[Tensor, Tensor | float]:
        """Return the gradient w.r.t. h Wᵀ + b = ``z`` [R, C] without the label term, and the derivative of the softcap.

        Overwrites ``z``. If ``lse`` [R] is None, the softmax is normalized over each row of ``z``.
        """
        slope: Tensor | float = 1.0
        z = z.mul_(self.saved.logit_scale)
        if softcap := self.saved.softcap:
            z.div_(softcap).tanh_()
            slope = z.square().neg_().add_(1.0)
            z.mul_(softcap)
        p = torch.softmax(z, 1) if lse is None else z.sub_(lse[:, None]).exp_()
        p.mul_(slope).mul_(self.request.grad_lse[tokens, None] * self.saved.logit_scale)
        return p.masked_fill_(~self.valid[tokens, None], 0.0), slope

    def filter_residual(self, tokens: Tensor | slice, entries: Tensor | slice) -> Tensor:
        """Return the exact minus the filtered gradient of the logits, [R, C] in the dtype of the inputs, without corrections."""
        tiles = self.columns(entries) // self.saved.plan.block_n
        gradient, _ = self.softmax_gradient(self.logits(tokens, entries), tokens, self.saved.lse[tokens])
        gradient -= self.selection.mass.per_row.t()[tokens][:, tiles] / self.width(tiles).float()
        dropped = self.dropped.t()[self.row_blocks[tokens]][:, tiles]
        return gradient.masked_fill_(~dropped, 0.0).to(self.weight.dtype)


def _hidden_error(step: _Step) -> Tensor:
    """Estimate the norm of the error of dh from tokens sampled by ``_dropped_energy``."""
    (_, mass, covariance, _), saved = step.selection, step.saved
    total = torch.zeros((), dtype=torch.float32, device=step.weight.device)
    for tokens, factors in _batches(_dropped_energy(step), MEASURED_TOKENS, step.saved.workspace.measured_at_once):
        error = multiply(step.filter_residual(tokens, ALL), step.weight)
        if covariance is not None:
            weighted = mass_weighted(saved.hidden[tokens], mass.per_token[tokens] * -saved.logit_scale)
            multiply_add(error, weighted, covariance)
        total = total + (error.square().sum(1) * factors).sum()
    return total.sqrt()


def _dropped_energy(step: _Step) -> Tensor:
    """Return the energy of each token's dropped tiles times its squared upstream gradient, [N]."""
    saved, n = step.saved, len(step.saved.hidden)
    total = torch.zeros(n, device=step.weight.device, dtype=torch.float32)
    for start in range(0, len(saved.tile_lse), step.rows_at_once):
        tiles = slice(start, start + step.rows_at_once)
        energy = (saved.tile_lse[tiles, :n] - saved.lse).exp_().square_().mul_(saved.tile_ratio[tiles, :n])
        total += energy.masked_fill_(~step.dropped[tiles].index_select(1, step.row_blocks), 0.0).sum(0)
    return torch.where(step.valid, total * step.request.grad_lse.square(), 0.0)


def _weight_error(step: _Step) -> Tensor:
    """Estimate the norm of the error of dW from rows sampled by the energy of the dropped tiles of their column block."""
    saved, (kept, mass, _, correction), v = step.saved, step.selection, len(step.weight)
    energy = torch.where(step.dropped, kept.energy, 0.0).sum(1).repeat_interleave(saved.plan.block_n)[:v]
    total = torch.zeros((), dtype=torch.float32, device=step.weight.device)
    for columns, factors in _batches(energy, MEASURED_ROWS, step.rows_at_once):
        entries = saved.vocabulary.vocab_perm[columns].long()
        error = multiply(step.filter_residual(ALL, entries).t(), saved.hidden)
        if correction is not None:
            tiles = columns // saved.plan.block_n
            dropped = mass.per_block[tiles] * -saved.logit_scale / step.width(tiles)
            coeffs = (correction.row_coeffs[columns] * dropped[:, None]).to(correction.basis.dtype)
            multiply_add(error, coeffs, correction.basis)
        total = total + (error.square().sum(1) * factors).sum()
    return total.sqrt()


def _rounding_errors(step: _Step) -> tuple[Tensor, Tensor]:
    """Estimate the norms of the errors of dh and dW if logits were rounded.

    Tokens are sampled by their expected squared error, some of them uniformly. Rounding errors of different tokens are assumed to
    be independent, so the squares of their contributions to dW are summed.
    """
    saved, request = step.saved, step.request
    expected = torch.where(step.valid, saved.rounding * request.grad_lse.square(), 0.0)
    hidden_error_sq, weight_error_sq = torch.zeros((2,), dtype=torch.float32, device=expected.device).unbind()
    for tokens, factors in _batches(
        expected + 0.1 * expected.mean(), ROUNDED_TOKENS, step.saved.workspace.measured_at_once
    ):
        z = step.logits(tokens, ALL)
        changed, rounded_slope = step.softmax_gradient(z.to(step.weight.dtype).float(), tokens, None)
        exact, slope = step.softmax_gradient(z, tokens, saved.lse[tokens])
        changed -= exact
        del z, exact
        if saved.softcap:
            labels = saved.labels[tokens]
            label_change = (rounded_slope - slope) * (request.grad_label[tokens] * saved.logit_scale)[:, None]
            changed += torch.where(saved.vocabulary.inv_vocab_perm == labels[:, None], label_change, 0.0)
            del label_change
        changed = changed.to(step.weight.dtype)
        hidden_error_sq = hidden_error_sq + (multiply(changed, step.weight).square().sum(1) * factors).sum()
        hidden_norm_sq = saved.hidden[tokens].float().square().sum(1)
        weight_error_sq = weight_error_sq + (changed.float().square().sum(1) * hidden_norm_sq * factors).sum()
    return hidden_error_sq.sqrt(), weight_error_sq.sqrt()
