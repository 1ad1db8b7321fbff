"""STUB with the final interface; the real one replaces it within the hour."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cce.config import CCEConfig


class LogProbs(NamedTuple):
    log_probs: Tensor
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logit: Tensor | None = None
    is_top1: Tensor | None = None
    logsumexp: Tensor | None = None


def _z(h, w, bias, scale, cap):
    z = h.float() @ w.float().t() if h.dtype != torch.float64 else h @ w.t()
    if bias is not None:
        z = z + bias
    z = z * scale
    return cap * torch.tanh(z / cap) if cap else z


def linear_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    num_items_in_batch: Tensor | int | float | None = None,
    shift: bool = False,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    config: CCEConfig | None = None,
) -> Tensor:
    if shift:
        labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    z = _z(hidden_states, weight, bias, logit_scale, softcap)
    t = labels.reshape(-1)
    loss = F.cross_entropy(z.reshape(t.numel(), -1), t, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing)
    if reduction == "none":
        return loss.view(labels.shape)
    if reduction == "sum":
        return loss.sum()
    n = num_items_in_batch if num_items_in_batch is not None else (t != ignore_index).sum().clamp(min=1)
    return loss.sum() / n


def linear_log_probs(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    entropy: bool = False,
    log_sum_sq_probs: bool = False,
    mean_logit: bool = False,
    is_top1: bool = False,
    logsumexp: bool = False,
    config: CCEConfig | None = None,
) -> LogProbs:
    z = _z(hidden_states, weight, bias, logit_scale, softcap)
    lp = z.log_softmax(-1)
    keep = labels != ignore_index
    out = lp.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * keep
    return LogProbs(out, logsumexp=z.logsumexp(-1) if logsumexp else None)
