"""Statistics of the labels of training losses: accuracy, entropy, perplexity, and the loss of groups of labels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_cce.checks import check_tensor
from hf_cce.loss import LogProbs

LOSS_GROUPS = 256  # groups are numbered below this


@dataclass
class TokenSums:
    """Sums over the labels of training losses, on their device: number of labels, −log p, top-1 hits, entropy."""

    sums: Tensor | None = None  # [4, 1 + LOSS_GROUPS], over the labels without a group, then by group

    def add(self, target: Tensor, ignore_index: int, found: LogProbs, groups: tuple[Tensor, Tensor] | None) -> None:
        """Add ``found`` [...] where ``target`` [...] is not ``ignore_index``, without synchronizing; see ``label_groups``."""
        valid = target != ignore_index
        values = valid, -found.log_probs, found.is_top1, found.entropy
        acc_dtype = torch.float32 if valid.device.type == "mps" else torch.float64
        with torch.no_grad():
            tokens = torch.stack([(x * valid).flatten().to(acc_dtype) for x in values if x is not None])
            new = tokens.new_zeros(4, 1 + LOSS_GROUPS)
            if groups is None:
                new[:, 0] = tokens.sum(1)
            else:
                new.index_add_(1, 1 + _groups_of_losses(*groups, target, valid), tokens)
            self.sums = new if self.sums is None else self.sums + new.to(self.sums.device)

    def means(self, before: Tensor | None = None) -> dict[str, float]:
        """Return means over all labels, or over those since the sums were ``before``; empty without labels. Synchronizes."""
        if self.sums is None:
            return {}
        counts, losses, right, entropies = (self.sums if before is None else self.sums - before).tolist()
        count = sum(counts)
        if count == 0:
            return {}
        loss = sum(losses) / count
        found = {"token_accuracy": sum(right) / count, "entropy": sum(entropies) / count}
        found["perplexity"] = math.exp(loss) if loss < 700 else math.inf
        return found | {f"loss_group_{i}": losses[i + 1] / n for i, n in enumerate(counts[1:]) if n > 0}


def label_groups(groups: Any, labels: Any) -> tuple[Tensor, Tensor]:
    """Return the group of each label, [B, T], and the ``labels`` [B, T] that the model was given, after checking ``groups``."""
    check_tensor("loss_groups", "[B] or [B, T]", groups)
    if labels is None:
        raise ValueError(
            "loss_groups needs labels in the same call; a loss of your own can be summed by group where you compute it"
        )
    if groups.is_floating_point() or groups.is_complex():
        raise ValueError(f"loss_groups must be integers, got {groups.dtype}")
    if groups.shape not in (labels.shape[:1], labels.shape):
        want = tuple(labels.shape)
        raise ValueError(f"loss_groups must have the shape {want[:1]} or {want} of labels, got {tuple(groups.shape)}")
    groups = groups.long()
    in_range = (groups.clamp(0, LOSS_GROUPS - 1) == groups).all()
    if in_range.is_cuda:
        torch._assert_async(in_range, f"hf_cce: loss_groups must lie in [0, {LOSS_GROUPS})")
    elif not in_range:
        raise ValueError(f"loss_groups must lie in [0, {LOSS_GROUPS}), got {int(groups.min())} to {int(groups.max())}")
    return groups.view(len(groups), -1).expand(labels.shape), labels


def _groups_of_losses(groups: Tensor, labels: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """Return the group of each entry of ``target``, which belong to all positions, or to all but the last of each sequence.

    Most models compare position t with label t + 1, some (BART, T5, or with ``shift_labels``) with label t: see which it was.
    """
    positions = valid.numel() // len(groups)
    if valid.numel() != len(groups) * positions or groups.shape[1] - positions not in (0, 1):
        raise ValueError(
            f"loss_groups cannot be used with this model: it computes {valid.numel()} losses for labels of shape "
            f"{tuple(groups.shape)}"
        )
    groups, labels = (x.to(target.device) for x in (groups, labels))
    next_labels = labels.roll(-1, 1)[:, :positions]
    is_next = (target.reshape(len(labels), -1) == next_labels) | ~valid.reshape(len(labels), -1)
    return torch.where(is_next.all(), groups.roll(-1, 1), groups)[:, :positions].flatten()
