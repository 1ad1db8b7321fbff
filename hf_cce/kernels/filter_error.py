"""Estimate the error of filtered gradients on a sample of tokens and of rows of dW.

Two errors are estimated, each for dh and for dW: what dropping tiles changes, and what a loss on full logits changes by rounding
its logits to the dtype of the inputs. ``FilterState`` moves the threshold until the first is a fixed share of the second.

This is plain PyTorch, since few steps are measured. The host reads no result, and results repeat bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_cce.kernels.filter import Kept, Mass
from hf_cce.kernels.layout import MEASURED_TOKENS, Backward, Filtered, Report
from hf_cce.kernels.products import multiply_add
from hf_cce.kernels.tilt import Leaning

# Rounding errors need a larger sample than filter errors: a few tokens have most of them.
ROUNDED_TOKENS = 4 * MEASURED_TOKENS
MEASURED_ROWS = 256  # of dW


@dataclass(frozen=True)
class FilterErrors:
    """Frobenius norms, as scalars on the device; None where the gradient is not needed."""

    error: Tensor | None  # of dh, from dropped tiles
    weight_error: Tensor | None  # of dW, from dropped tiles
    rounding_error: Tensor | None  # of dh, from rounded logits
    rounding_weight_error: Tensor | None  # of dW, from rounded logits


def estimate_errors(
    saved: Filtered,
    weight: Tensor,  # [V, D]
    asked: Backward,
    kept: Kept,
    mass: Mass,
    tilt: Tensor | None,  # [D, D]
    lean: Leaning | None,
) -> FilterErrors:
    """Estimate both errors of the gradients that ``asked`` needs, before the gradients are computed."""
    step = _Step(saved, weight, asked, kept, mass)
    in_all_tiles, in_dropped_tiles = _token_energies(step)
    rounding_hidden, rounding_weight = _rounding_errors(step, in_all_tiles)
    return FilterErrors(
        _hidden_error(step, in_dropped_tiles, tilt) if asked.need_hidden else None,
        _weight_error(step, lean) if asked.need_weight else None,
        rounding_hidden if asked.need_hidden else None,
        rounding_weight if asked.need_weight else None,
    )


def relative_errors(report: Report, grad_hidden: Tensor | None, grad_weight: Tensor | None) -> Report:
    """``report`` with each error divided by the norm of its gradient."""
    relative = {}
    for gradient, names in (
        (grad_hidden, ("error", "rounding_error")),
        (grad_weight, ("weight_error", "rounding_weight_error")),
    ):
        errors = {name: getattr(report, name) for name in names if getattr(report, name) is not None}
        if errors and gradient is not None:
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
            relative.update({name: error / norm for name, error in errors.items()})
    return report._replace(**relative)


def sample(weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Draw ``count`` indices by systematic sampling, with probabilities proportional to ``weights`` [M].

    Returns:
        ``indices`` [count] in ascending order, and ``factors`` [count], float32: for any f [M] that is zero where ``weights``
        are, ``(factors * f[indices]).sum()`` estimates ``f.sum()`` without bias.
    """
    if count >= len(weights):
        return torch.arange(len(weights), device=weights.device), torch.ones_like(weights)
    total = weights.sum(dtype=torch.float64)
    share = weights / total
    # Summed as integers: parallel prefix sums of floats do not repeat bit for bit.
    upto = (share * 2.0**48).nan_to_num(0.0, 0.0, 0.0).long().cumsum(0)
    targets = (2 * torch.arange(count, device=weights.device) + 1) * upto[-1] // (2 * count)
    indices = torch.searchsorted(upto, targets, right=True).clamp_max(len(weights) - 1)
    factors = torch.where(total == 0, 0.0, 1.0 / (count * share[indices]))
    return indices, factors.float()


@dataclass(frozen=True)
class _Step:
    """The filtered step that is measured. Logits and entries of the vocabulary are in their own order, tokens in that of rows."""

    saved: Filtered
    weight: Tensor  # [V, D]
    asked: Backward
    kept: Kept
    mass: Mass

    @property
    def tokens_at_once(self) -> int:
        """Tokens whose logits may be held in float32 at the same time."""
        return self.saved.layout.measured_at_once

    @property
    def rows_at_once(self) -> int:
        """Vocabulary entries or tiles for which the same memory holds one number for each token, as often."""
        return max(1, self.tokens_at_once * len(self.weight) // len(self.saved.hidden))

    def logits(self, tokens: Tensor | None, entries: Tensor | None) -> Tensor:
        """h Wᵀ + b, [R, C] float32, of some tokens and some entries; None: of all."""
        hidden = self.saved.hidden if tokens is None else self.saved.hidden.index_select(0, tokens)
        weight = self.weight if entries is None else self.weight.index_select(0, entries)
        z = torch.empty((len(hidden), len(weight)), device=hidden.device, dtype=torch.float32)
        multiply_add(z, hidden, weight.t(), first=True)
        if self.saved.bias is not None:
            z += self.saved.bias[self.columns(entries)]
        return z

    def columns(self, entries: Tensor | None) -> Tensor:
        """Where entries of the vocabulary are in the order of columns; None: all entries."""
        rank = self.saved.vocabulary.rank
        return (rank if entries is None else rank[entries]).long()

    def softmax_gradient(self, z: Tensor, tokens: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | float]:
        """Gradient of logits ``z`` [R, C], overwritten, but for the term of the label; and the derivative of the softcap.

        Without ``lse`` [R] the softmax is that of the rows of ``z``.
        """
        slope: Tensor | float = 1.0
        z = z.mul_(self.saved.logit_scale)
        if softcap := self.saved.softcap:
            z.div_(softcap).tanh_()
            slope = z.square().neg_().add_(1.0)
            z.mul_(softcap)
        p = torch.softmax(z, 1) if lse is None else z.sub_(lse[:, None]).exp_()
        p.mul_(slope).mul_(self.asked.grad_lse[tokens, None] * self.saved.logit_scale)
        return p.masked_fill_(~self.valid(tokens)[:, None], 0.0), slope

    def valid(self, tokens: Tensor) -> Tensor:
        """[R]: whether the labels of these tokens are not ignored."""
        return self.saved.order.labels[tokens] < len(self.weight)

    def left_out(self, tokens: Tensor | None, entries: Tensor | None) -> Tensor:
        """What the filter leaves out of the gradient of ``logits``, [R, C] in the dtype of the inputs."""
        plan, v = self.saved.plan, len(self.weight)
        z, tiles = self.logits(tokens, entries), self.columns(entries) // plan.block_n
        tokens = torch.arange(len(z), device=z.device) if tokens is None else tokens
        width = (v - tiles * plan.block_n).clamp_max(plan.block_n)
        gradient, _ = self.softmax_gradient(z, tokens, self.saved.lse[tokens])
        gradient -= self.mass.rows[tiles, tokens[:, None]] / width.float()
        kept = (self.kept.place >= 0)[tiles, tokens[:, None] // plan.block_m]
        return gradient.masked_fill_(kept, 0.0).to(self.weight.dtype)


def _token_energies(step: _Step) -> tuple[Tensor, Tensor]:
    """Σ (p − S/width)² of each token, times its squared gradient: over all tiles and over dropped ones, [N] each.

    The first is reshaped into how much rounding can matter for a token. Rounding moves p by p (δ − Σ p δ), δ independent for each
    logit; with E = Σ p² that is in square E (1 − √E)² where one entry has most of the probability, E (1 − E) where several share
    it evenly. The geometric mean of the two is taken.
    """
    saved, n = step.saved, len(step.saved.hidden)
    tokens = torch.arange(n, device=step.weight.device)
    valid, row_blocks = step.valid(tokens), tokens // saved.plan.block_m
    in_all, in_dropped = torch.zeros((2, n), device=step.weight.device, dtype=torch.float32).unbind()
    for start in range(0, len(saved.tile_lse), step.rows_at_once):
        tiles = slice(start, start + step.rows_at_once)
        energy = (saved.tile_lse[tiles, :n] - saved.lse).exp_().square_().mul_(saved.tile_ratio[tiles, :n])
        in_all += energy.sum(0)
        kept = (step.kept.place[tiles] >= 0).index_select(1, row_blocks)
        in_dropped += energy.masked_fill_(kept, 0.0).sum(0)
    e = in_all.clamp_max(1.0)
    likely = e * (1.0 - e.sqrt()) * (1.0 - e).sqrt()
    squared = step.asked.grad_lse.square()
    return torch.where(valid, likely * squared, 0.0), torch.where(valid, in_dropped * squared, 0.0)


def _hidden_error(step: _Step, energy: Tensor, tilt: Tensor | None) -> Tensor:
    """The error of dh, from tokens drawn by the ``energy`` [N] of their dropped tiles."""
    tokens, factors = sample(energy, min(len(energy), MEASURED_TOKENS))
    total = torch.zeros((), device=tokens.device)
    for some, factor in zip(tokens.split(step.tokens_at_once), factors.split(step.tokens_at_once), strict=True):
        wrong = torch.empty((len(some), step.weight.shape[1]), device=tokens.device)
        multiply_add(wrong, step.left_out(some, None), step.weight, first=True)
        if tilt is not None:
            dropped = step.mass.of_token[:, some].sum(0)[:, None] * -step.saved.logit_scale
            # Hidden states of ignored tokens need not be finite.
            corrected = torch.where(dropped == 0.0, 0.0, step.saved.hidden[some] * dropped)
            multiply_add(wrong, corrected.to(tilt.dtype), tilt, first=False)
        total = total + (wrong.square().sum(1) * factor).sum()
    return total.sqrt()


def _weight_error(step: _Step, lean: Leaning | None) -> Tensor:
    """The error of dW, from rows drawn by the energy of the dropped tiles of their column block."""
    saved, kept, (v, d) = step.saved, step.kept, step.weight.shape
    energy = torch.where(kept.place < 0, kept.energy, 0.0).sum(1).repeat_interleave(saved.plan.block_n)[:v]
    columns, factors = sample(energy, min(v, MEASURED_ROWS))
    total = torch.zeros((), device=columns.device)
    for some, factor in zip(columns.split(step.rows_at_once), factors.split(step.rows_at_once), strict=True):
        wrong = torch.empty((len(some), d), device=columns.device)
        entries = saved.order.order[some].long()
        multiply_add(wrong, step.left_out(None, entries).t(), saved.hidden, first=True)
        if lean is not None:
            tiles = some // saved.plan.block_n
            width = (v - tiles * saved.plan.block_n).clamp_max(saved.plan.block_n)
            dropped = step.mass.leaves.sum(1)[tiles] * -saved.logit_scale / width
            multiply_add(wrong, (lean.along[some] * dropped[:, None]).to(lean.back.dtype), lean.back, first=False)
        total = total + (wrong.square().sum(1) * factor).sum()
    return total.sqrt()


def _rounding_errors(step: _Step, likely: Tensor) -> tuple[Tensor, Tensor]:
    """The errors of dh and dW of a loss whose logits are rounded, from tokens drawn by ``likely`` [N] and, a little, evenly.

    Rounding errors of different tokens are taken for independent: the squares of their parts of dW add up.
    """
    saved, asked = step.saved, step.asked
    tokens, factors = sample(likely + 0.1 * likely.mean(), min(len(likely), ROUNDED_TOKENS))
    of_hidden, of_weight = torch.zeros((2,), device=tokens.device).unbind()
    for some, factor in zip(tokens.split(step.tokens_at_once), factors.split(step.tokens_at_once), strict=True):
        z = step.logits(some, None)
        changed, rounded_slope = step.softmax_gradient(z.to(step.weight.dtype).float(), some, None)
        exact, slope = step.softmax_gradient(z, some, saved.lse[some])
        changed -= exact
        if saved.softcap:
            labels = saved.order.labels[some]
            at_label = (rounded_slope - slope) * (asked.grad_label[some] * saved.logit_scale)[:, None]
            changed += torch.where(saved.vocabulary.rank == labels[:, None], at_label, 0.0)
        changed = changed.to(step.weight.dtype)
        product = torch.empty((len(some), step.weight.shape[1]), device=tokens.device)
        multiply_add(product, changed, step.weight, first=True)
        of_hidden = of_hidden + (product.square().sum(1) * factor).sum()
        lengths = saved.hidden[some].float().square().sum(1)
        of_weight = of_weight + (changed.float().square().sum(1) * lengths * factor).sum()
    return of_hidden.sqrt(), of_weight.sqrt()
