"""What the kernels' host functions hand to each other: what logits and their gradients are made of, statistics of tiles."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_cce.kernels.launch_config import row_major
from hf_cce.spec import Inputs, LossSpec, TokenGrads


class Shape(NamedTuple):
    """The sizes on which the division of the memory budget depends."""

    n: int  # tokens
    d: int  # hidden size
    v: int  # vocabulary entries
    dtype: torch.dtype


class LogitInputs(NamedTuple):
    """What logits are computed from: softcap · tanh(logit_scale · (hidden · weightᵀ + bias) / softcap)."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    labels: Tensor  # [N]
    ignore_index: int
    logit_scale: float
    softcap: float  # 0: none

    @classmethod
    def of(cls, x: Inputs, spec: LossSpec) -> LogitInputs:
        return cls(*x, *spec.form)

    @property
    def shape(self) -> Shape:
        (n, d), v = self.hidden.shape, self.weight.shape[0]
        return Shape(n, d, v, self.hidden.dtype)

    @property
    def flags(self) -> dict[str, bool]:
        """The constants by which kernels leave out what these logits do not have."""
        return {
            "HAS_BIAS": self.bias is not None,
            "HAS_SCALE": self.logit_scale != 1.0,
            "HAS_SOFTCAP": self.softcap > 0,
        }

    def readable(self) -> LogitInputs:
        """Copies where the entries of a row are not side by side, as the kernels read them."""
        bias = None if self.bias is None else self.bias.contiguous()
        return self._replace(
            hidden=row_major(self.hidden), weight=row_major(self.weight), bias=bias, labels=self.labels.contiguous()
        )

    def tokens(self, rows: slice) -> LogitInputs:
        return self._replace(hidden=self.hidden[rows], labels=self.labels[rows])

    def columns(self, start: int, stop: int) -> LogitInputs:
        """The same logits for the vocabulary entries from ``start`` to ``stop``; labels stay what they are."""
        bias = None if self.bias is None else self.bias[start:stop]
        return self._replace(weight=self.weight[start:stop], bias=bias)


class TileStats(NamedTuple):
    """Statistics of T tiles for each token: T · padded(N) numbers each, None where not wanted."""

    lse: Tensor  # logsumexp of the tile's logits z
    z_sum: Tensor | None = None
    expectation: Tensor | None = None  # of z, by softmax over the tile
    lse2: Tensor | None = None  # logsumexp of 2 z
    z_max: Tensor | None = None
    ratio: Tensor | None = None  # bfloat16, see hf_cce.kernels.filter, like the next
    damping: Tensor | None = None

    @property
    def flags(self) -> dict[str, bool]:
        """The constants by which kernels leave out statistics of tokens that are not wanted."""
        return {
            "WANT_MEAN": self.z_sum is not None,
            "WANT_ENTROPY": self.expectation is not None,
            "WANT_SQ": self.lse2 is not None,
            "WANT_TOP1": self.z_max is not None,
        }


class GradInputs(NamedTuple):
    """What the gradient of logits is made of besides the logits: statistics of the tokens and their gradients, [N] each."""

    lse: Tensor
    grad_lse: Tensor
    grad_label: Tensor
    entropy: Tensor | None = None
    grad_mean: Tensor | None = None
    grad_entropy: Tensor | None = None

    @classmethod
    def of(cls, lse: Tensor, entropy: Tensor | None, grads: TokenGrads) -> GradInputs:
        vectors = (lse, grads.lse, grads.label, entropy, grads.mean, grads.entropy)
        return cls(*(None if x is None else x.contiguous() for x in vectors))  # type: ignore[arg-type]

    def tokens(self, rows: slice) -> GradInputs:
        return GradInputs(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]
