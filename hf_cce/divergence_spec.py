"""Data types of one divergence: the heads and the checked options.

Legend: N tokens, D hidden size, V vocabulary; z logits after scale, softcap and temperature; p = softmax(z); β: 0 for the forward
KL(p_teacher ‖ p_student), 1 for the reverse KL(p_student ‖ p_teacher), else the JSD with the mixture
m = (1 − β) p_student + β p_teacher, as in TRL's ``DistillationTrainer``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cce.reference import apply_scale_and_softcap_
from hf_cce.spec import DivergencePlan


class Head(NamedTuple):
    """Operands of the logits softcap · tanh(logit_scale · (hidden · weightᵀ + bias) / softcap)."""

    hidden: Tensor  # [N, D]; if weight is None, [N, V] of what ``form`` says
    weight: Any  # [V, D] or None
    bias: Tensor | None  # [V]
    logit_scale: float  # includes the temperature, like softcap
    softcap: float  # 0: none
    form: Literal["logits", "p", "log p"] = "logits"  # p need not sum to 1

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

    def log_probs(self, z: Tensor, dtype: torch.dtype) -> Tensor:
        """Return log p in ``dtype``, never ``z`` itself, from hidden · weightᵀ + bias or what ``form`` says."""
        if self.form == "logits":
            return F.log_softmax(self.finish(z, dtype), 1, dtype=dtype)
        found = z.to(dtype, copy=True)
        return found.log_() if self.form == "p" else found

    def logit_derivative(self, z: Tensor) -> Tensor | float:
        """Return ∂z/∂x at ``z``, where x is the logit before scale and softcap."""
        if not self.softcap:
            return self.logit_scale
        return (z / self.softcap).square_().neg_().add_(1).mul_(self.logit_scale)


class DivergenceSpec(NamedTuple):
    """The checked options of one divergence, on the host."""

    beta: float
    entropy: bool  # also return the student's entropy, for logging
    plan: DivergencePlan


Needs = tuple[bool, bool, bool]  # which gradients are needed: of hidden states, weight and bias
HeadGrads = Sequence[Tensor | None]  # likewise
