"""Data types of one loss: checked options, inputs, and the tuples passed between strategies, operators and autograd.

Legend: N tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hf_cce.config import CCEConfig

# How a divergence and its gradients are computed:
# - "keep": at once, and the student's logits are kept for the backward pass, see ``hf_cce.divergence_rows``;
# - "one_pass": gradients are computed with the divergence, for equal upstream gradients of all tokens;
# - "blocks": the logits are computed twice.
Way = Literal["keep", "one_pass", "blocks"]


class LossSpec(NamedTuple):
    """The checked options of one loss, on the host. ``hf_cce.loss`` makes it once from the user's arguments."""

    ignore_index: int
    logit_scale: float
    softcap: float  # 0: none
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    needs: tuple[bool, bool, bool] = (False, False, False)  # gradients of hidden, weight, bias
    memory_budget: int = 256 << 20  # bytes
    implementation: str = "auto"
    gradient_filter: Literal["auto"] | float | None = None
    auto_budget: bool = False  # memory_budget="auto": hf_cce.dispatch may use more

    @classmethod
    def of(
        cls, config: CCEConfig, tokens: int, needs: tuple[bool, bool, bool], form: tuple[int, float, float] = (-100, 1.0, 0.0),
        label_smoothing: float = 0.0, z_loss: float = 0.0,
    ) -> LossSpec:  # fmt: skip
        """Return the spec of a loss of ``tokens`` tokens with the options of ``config``."""
        return cls(
            *form, label_smoothing, z_loss, needs, config.workspace_bytes(tokens), config.implementation,
            config.gradient_filter, config.memory_budget == "auto",
        )  # fmt: skip


class Inputs(NamedTuple):
    """The tensors of one loss, checked and flattened."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    labels: Tensor  # [N] int64


class Divisor(NamedTuple):
    """Divisor of the summed loss: ``number`` if positive, else ``items``, else the number of valid labels."""

    items: Tensor | None = None  # scalar on the device
    number: float = 0.0


class WantedStats(NamedTuple):
    """Statistics requested in addition to logsumexp and the label's logit."""

    mean: bool = False
    entropy: bool = False
    log_sum_sq: bool = False
    top1: bool = False


class LogitStats(NamedTuple):
    """Per-token statistics [N] of the logits in the accumulation dtype; zero where ignored, empty if not requested."""

    lse: Tensor
    label_logit: Tensor
    mean_logit: Tensor
    entropy: Tensor
    log_sum_sq: Tensor
    is_top1: Tensor  # bool


class TokenGrads(NamedTuple):
    """Upstream gradients of the statistics, [N] each."""

    lse: Tensor
    label: Tensor
    mean: Tensor | None = None
    entropy: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> TokenGrads:
        return TokenGrads(*(None if g is None else function(g) for g in self))  # type: ignore[arg-type]

    @classmethod
    def of_loss(cls, grad: Tensor, factor: Tensor, lse: Tensor, spec: LossSpec) -> TokenGrads:
        """Return the gradients of ``grad`` · ``factor`` · Σ loss with respect to the statistics."""
        g = (grad * factor).to(lse.dtype).expand_as(lse)
        grad_lse = g * (1 + 2 * spec.z_loss * lse) if spec.z_loss else g.contiguous()
        smoothing = spec.label_smoothing
        grad_label = (g * (smoothing - 1)).contiguous()
        return cls(grad_lse, grad_label, (g * -smoothing).contiguous() if smoothing else None)

    @classmethod
    def of_stats(cls, lse: Tensor, upstream: Sequence[Tensor | None]) -> TokenGrads:
        """Return contiguous upstream gradients of ``LogitStats``; missing ones of lse and label_logit become zeros."""
        grad_lse, grad_label, mean, entropy = (None if g is None else g.contiguous() for g in upstream[:4])
        zero = torch.zeros_like(lse) if grad_lse is None or grad_label is None else lse
        return cls(zero if grad_lse is None else grad_lse, zero if grad_label is None else grad_label, mean, entropy)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64, float32 for all narrower dtypes."""
    return torch.float64 if dtype == torch.float64 else torch.float32
