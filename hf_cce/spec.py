"""Data types of one loss: checked options, inputs, and the tuples passed between strategies, operators and autograd.

Legend: N tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hf_cce.config import CCEConfig


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


class Tokens(NamedTuple):
    """Tokens that take part in a computation: all if both fields are None; at most one is not."""

    mask: Tensor | None = None  # [N] bool
    indices: Tensor | None = None  # only on a CPU, because finding them would synchronize with a GPU

    @classmethod
    def of(cls, mask: Tensor | None, device: torch.device) -> Tokens:
        """Select the tokens where ``mask`` [N] is True."""
        return cls(mask) if mask is None or device.type != "cpu" else cls(indices=mask.nonzero().squeeze(1))

    def gather(self, x: Tensor, rows: slice = slice(None), fill: float = 0) -> Tensor:
        """Return ``rows`` of those of ``x`` [N, ·]; ``fill`` where ``mask`` is False, so that NaN there cannot propagate."""
        if self.mask is not None:
            return torch.where(self.mask[rows, None], x[rows], fill)
        if self.indices is not None:
            return x.index_select(0, self.indices[rows])
        return x if rows == slice(None) else x[rows]

    def scatter(self, values: Any, n: int) -> Any:
        """Return ``values``, if not None, for all tokens [N, ·]; zero for the others."""
        if self.mask is not None and values is not None:
            return torch.where(self.mask.view(-1, *[1] * (values.dim() - 1)), values, 0)
        if self.indices is None or values is None:
            return values
        return values.new_zeros(n, *values.shape[1:]).index_copy_(0, self.indices, values)


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


class DivergencePlan(NamedTuple):
    """How a divergence and its gradients are computed: the choice of ``hf_cce.dispatch``."""

    memory_budget: int  # bytes, beside kept logits
    triton: bool
    # The kernels compute the logits, too, less about the largest of the row, so that float16 hardly rounds them.
    multiplies: bool
    # - "keep": at once, and the student's logits are kept for the backward pass, see ``hf_cce.divergence_rows``;
    # - "one_pass": gradients are computed with the divergence, for equal upstream gradients of all tokens;
    # - "blocks": the logits are computed twice.
    way: Literal["keep", "one_pass", "blocks"]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64, float32 for all narrower dtypes."""
    return torch.float64 if dtype == torch.float64 else torch.float32
