"""Tuples that the kernels' host functions pass to each other: inputs of the logits and of their gradients, tile statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_cce.kernels.launch_config import row_major
from hf_cce.spec import Inputs, LossSpec, TokenGrads


class Shape(NamedTuple):
    """Sizes and dtype that determine how the memory budget is divided."""

    n: int  # tokens
    d: int  # hidden size
    v: int  # vocabulary entries
    dtype: torch.dtype


def with_contiguous_rows(x: Any) -> Any:
    """Return ``x`` (``LogitInputs`` or a head of ``hf_cce.divergence_spec``) with ``row_major`` hidden, weight and bias."""
    weight = None if x.weight is None else row_major(x.weight)
    return x._replace(hidden=row_major(x.hidden), weight=weight, bias=None if x.bias is None else x.bias.contiguous())


def scale_and_softcap(x: Any) -> tuple[float | None, float | None]:
    """Return the kernels' arguments ``logit_scale`` and ``softcap``; kernels compile out what is None."""
    return None if x.logit_scale == 1.0 else x.logit_scale, x.softcap or None


class LogitInputs(NamedTuple):
    """Inputs of the logits softcap · tanh(logit_scale · (hidden · weightᵀ + bias) / softcap)."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    labels: Tensor  # [N]
    ignore_index: int
    logit_scale: float
    softcap: float  # 0: no softcap

    @classmethod
    def from_spec(cls, x: Inputs, spec: LossSpec) -> LogitInputs:
        """Return the inputs of a loss, copied if their rows are not contiguous."""
        inputs = cls(*x, spec.ignore_index, spec.logit_scale, spec.softcap)
        return with_contiguous_rows(inputs._replace(labels=x.labels.contiguous()))

    @property
    def shape(self) -> Shape:
        (n, d), v = self.hidden.shape, self.weight.shape[0]
        return Shape(n, d, v, self.hidden.dtype)

    def tokens(self, rows: slice) -> LogitInputs:
        return self._replace(hidden=self.hidden[rows], labels=self.labels[rows])

    def columns(self, start: int, stop: int) -> LogitInputs:
        """Select the vocabulary entries from ``start`` to ``stop``; labels are not shifted."""
        bias = None if self.bias is None else self.bias[start:stop]
        return self._replace(weight=self.weight[start:stop], bias=bias)


class TileStats(NamedTuple):
    """Statistics of T tiles for each token: T · padded(N) numbers each, None if not requested."""

    lse: Tensor  # logsumexp of the tile's logits z
    z_sum: Tensor | None = None
    expectation: Tensor | None = None  # mean of z under the softmax over the tile
    lse2: Tensor | None = None  # logsumexp of 2 z
    z_max: Tensor | None = None
    ratio: Tensor | None = None  # bfloat16: see hf_cce.kernels.filter.select
    damping: Tensor | None = None  # likewise


class GradInputs(NamedTuple):
    """Inputs of the logits' gradient besides the logits: statistics of the tokens and their upstream gradients, [N] each."""

    lse: Tensor
    upstream: TokenGrads
    entropy: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> GradInputs:
        entropy = None if self.entropy is None else function(self.entropy)
        return GradInputs(function(self.lse), self.upstream.map(function), entropy)
