"""Data types of one divergence: the heads, the order of the tokens, and the checked options.

Legend: N tokens, D hidden size, V vocabulary; z logits after scale, softcap and temperature; p = softmax(z); β: 0 for the forward
KL(p_teacher ‖ p_student), 1 for the reverse KL(p_student ‖ p_teacher), else the JSD with the mixture
m = (1 − β) p_student + β p_teacher, as in TRL's ``DistillationTrainer``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_cce.reference import apply_scale_and_softcap_
from hf_cce.spec import Way


class Head(NamedTuple):
    """Operands of the logits softcap · tanh(logit_scale · (hidden · weightᵀ + bias) / softcap)."""

    hidden: Tensor  # [N, D]; the logits [N, V] if weight is None
    weight: Any  # [V, D] or None
    bias: Tensor | None  # [V]
    logit_scale: float  # includes the temperature, like softcap
    softcap: float  # 0: none

    def columns(self, start: int, stop: int) -> Head:
        """Return the head for the vocabulary entries [start, stop)."""
        if self.weight is None:
            return self._replace(hidden=self.hidden[:, start:stop])
        bias = None if self.bias is None else self.bias[start:stop]
        return self._replace(weight=self.weight[start:stop], bias=bias)

    def finish(self, z: Tensor, dtype: torch.dtype) -> Tensor:
        """Return logits from hidden · weightᵀ + bias: in ``dtype``, or ``z`` itself without scale and softcap."""
        if self.logit_scale == 1.0 and not self.softcap:
            return z
        return apply_scale_and_softcap_(z.to(dtype, copy=True), self.logit_scale, self.softcap)

    def logit_derivative(self, z: Tensor) -> Tensor | float:
        """Return ∂z/∂x at ``z``, where x is the logit before scale and softcap."""
        if not self.softcap:
            return self.logit_scale
        return (z / self.softcap).square_().neg_().add_(1).mul_(self.logit_scale)


class Tokens(NamedTuple):
    """An order of the tokens in which those selected by the mask come first."""

    order: Any  # [N], on a CPU only the selected tokens; None if all are selected
    num_valid: Any  # scalar int64; None if all are selected

    @classmethod
    def of(cls, mask: Tensor | None, device: torch.device) -> Tokens:
        """Create the order for ``mask`` [N], True for selected tokens. Does not synchronize with a GPU."""
        if mask is None:
            return cls(None, None)
        if device.type == "cpu":
            order = mask.nonzero().squeeze(1)
            return cls(order, torch.tensor(order.numel()))
        return cls(torch.argsort(~mask, stable=True), mask.sum())

    def gather(self, x: Tensor, rows: slice = slice(None), fill: float = 0) -> Tensor:
        """Return ``rows`` of ``x`` [N, ·] in this order; ``fill`` where not selected, so that NaN there cannot propagate."""
        if self.order is None:
            return x[rows]
        return torch.where(self.valid(x)[rows, None], x.index_select(0, self.order[rows]), fill)

    def valid(self, x: Tensor) -> Tensor:
        return torch.arange(self.order.numel(), device=x.device) < self.num_valid

    def scatter(self, values: Tensor, n: int) -> Tensor:
        """Return ``values`` in the original order [N, ·]; zero for tokens that are not selected."""
        if self.order is None:
            return values
        valid = self.valid(values).view(-1, *[1] * (values.dim() - 1))
        return values.new_zeros(n, *values.shape[1:]).index_copy_(0, self.order, torch.where(valid, values, 0))


@dataclass(frozen=True)
class DivergenceSpec:
    """The checked options of one divergence, on the host."""

    beta: float
    entropy: bool  # also return the student's entropy, for logging
    memory_budget: int  # bytes, beside kept logits
    triton: bool
    multiplies: bool  # the kernels compute whole rows of logits, too: in float16, shifted to be hardly rounded
    way: Way


Needs = tuple[bool, bool, bool]  # which gradients are needed: of hidden states, weight and bias
HeadGrads = Sequence[Tensor | None]  # likewise
