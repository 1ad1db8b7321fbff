"""What an LM head with adapters returns while its forward runs: a sum of products that have not been multiplied out.

LoRA, DoRA, VeRA, LoKr, LoHa and IA3 add to the product of the head more products that end in the vocabulary, some multiplied by
a vector with a number per word. All that is one linear head: Σ fᵢ ⊙ (xᵢ Wᵢᵀ) + b = [x₁, x₂ …] [f₁ ⊙ W₁, f₂ ⊙ W₂ …]ᵀ + b.
``TermSum`` collects the terms; at the end of the head's forward ``deferred`` makes one head of them, whose gradient autograd
takes apart again. Whatever else is asked of it gets the real logits.

Shapes: xᵢ [..., Dᵢ], Wᵢ [V, Dᵢ], fᵢ [V] or a number, b [V] or None.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from hf_cce.calls import Call
from hf_cce.deferred import DeferredLogits
from hf_cce.symbolic import Symbolic, cast_targets, plain

Number = float  # inside TermSum ``float`` is the method
Factor = Tensor | float  # [V], or one for all words


class Term(NamedTuple):
    """factor ⊙ (hidden_states · weightᵀ)."""

    hidden_states: Tensor  # [..., D]
    weight: Tensor  # [V, D]
    factor: Factor = 1.0


class TermSum(Symbolic):
    """Stands for the sum of ``terms`` and ``bias``, of the dtype that torch would give it."""

    def __init__(
        self,
        terms: tuple[Term, ...],
        bias: Tensor | None,
        dtype: torch.dtype,
        call: Call,
        cast: torch.dtype | None,
    ) -> None:
        self.terms = terms
        self.bias = bias
        self.call = call
        self.cast = cast
        self._dtype = dtype
        self._finished: DeferredLogits | None = None

    @property
    def shape(self) -> torch.Size:
        first = self.terms[0]
        return torch.Size((*first.hidden_states.shape[:-1], first.weight.shape[0]))

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self.terms[0].hidden_states.device

    @property
    def requires_grad(self) -> bool:
        return self.deferred().requires_grad

    @property
    def _written(self) -> bool:
        """Somebody has written into the real logits (PEFT's aLoRA, through a view): the terms are stale."""
        return self._finished is not None and self._finished._written

    def to(self, *args: Any, **kwargs: Any) -> Any:
        targets = cast_targets(args, kwargs)
        elsewhere = targets is None or any(isinstance(each, torch.device) and each != self.device for each in targets)
        if self._written or targets is None or elsewhere:
            return self.deferred().to(*args, **kwargs)
        dtypes = [each for each in targets if isinstance(each, torch.dtype)]
        return self._of(self.terms, self.bias, dtypes[-1] if dtypes else self.dtype)

    def float(self) -> TermSum:
        return self.to(torch.float32)

    def add(self, other: Any, **kwargs: Any) -> Any:
        """Another sum for the same tokens, or a bias per word."""
        alike = isinstance(other, TermSum) and self.shape == other.shape and self.cast == other.cast
        if alike and not kwargs and not self._written and not other._written:
            terms = self.terms
            for term in other.terms:
                terms = _with(terms, term)
            return self._of(terms, _plus(self.bias, other.bias), torch.promote_types(self.dtype, other.dtype))
        vector = self._per_word(other)
        if vector is None or kwargs:
            return self._real("add").add(plain(other), **kwargs)
        return self._of(self.terms, _plus(self.bias, vector), torch.promote_types(self.dtype, vector.dtype))

    def sub(self, other: Any, **kwargs: Any) -> Any:
        """Without a bias per word, as DoRA takes the head's own away before it scales."""
        vector = self._per_word(other)
        if vector is None or kwargs:
            return self._real("sub").sub(plain(other), **kwargs)
        bias = None if other is self.bias else _plus(self.bias, -vector)
        return self._of(self.terms, bias, torch.promote_types(self.dtype, vector.dtype))

    def mul(self, other: Any) -> Any:
        """By a number, or by one number per word."""
        number = isinstance(other, (int, Number)) and not isinstance(other, bool) and not self._written
        factor = Number(other) if number else self._per_word(other)
        if factor is None:
            return self._real("mul").mul(plain(other))
        terms = tuple(term._replace(factor=term.factor * factor) for term in self.terms)
        dtype = self.dtype if number else torch.promote_types(self.dtype, other.dtype)
        return self._of(terms, None if self.bias is None else self.bias * factor, dtype)

    __mul__ = __rmul__ = multiply = mul
    __add__ = __radd__ = add
    __sub__ = subtract = sub

    def deferred(self) -> DeferredLogits:
        """The deferred logits of one head that gives the sum."""
        if self._finished is None:
            self._finished = self._joined()
        return self._finished

    def _joined(self) -> DeferredLogits:
        first = self.terms[0]
        inputs: list[Tensor] = []
        weights: list[Tensor] = []
        for term in self.terms:
            x, weight = term.hidden_states.to(first.hidden_states.dtype), term.weight
            if isinstance(term.factor, Tensor):
                weight = weight * term.factor.unsqueeze(-1)
            elif term.factor != 1.0:
                x = x * term.factor
            weight = weight.to(first.weight.dtype)
            same = [i for i, each in enumerate(inputs) if each is x]
            if same:  # LoHa and LoKr: a product of the same input with another weight
                weights[same[0]] = weights[same[0]] + weight
            else:
                inputs.append(x)
                weights.append(weight)
        bias = None if self.bias is None else self.bias.to(first.weight.dtype)
        one = len(inputs) == 1
        made = (self.call.kind or DeferredLogits)(
            inputs[0] if one else torch.cat(inputs, -1),
            weights[0] if one else torch.cat(weights, 1),
            bias,
            call=self.call,
            cast=self.cast,
        )
        return made if made.dtype == self.dtype else made.to(self.dtype)

    def _per_word(self, value: Any) -> Tensor | None:
        """``value`` as [V] where it is a floating tensor that has one number per word, the same for all tokens; or None."""
        words = self.shape[-1]
        fits = isinstance(value, Tensor) and value.dim() in range(1, self.ndim + 1) and value.shape[-1] == words
        fits = fits and not self._written
        if not fits or value.numel() != words or not value.is_floating_point() or value.device != self.device:
            return None
        return value.reshape(-1)

    def _of(self, terms: tuple[Term, ...], bias: Tensor | None, dtype: torch.dtype) -> TermSum:
        return TermSum(terms, bias, dtype, self.call, self.cast)

    def _real(self, why: str) -> Tensor:
        return self.deferred()._real(why)

    _ANSWERS: ClassVar[dict[Any, str]] = {
        torch.add: "add", torch.mul: "mul", torch.multiply: "mul", torch.sub: "sub", torch.subtract: "sub",
    }  # fmt: skip
    # With the sum on the right and a tensor on the left
    _COMMUTES: ClassVar[dict[Any, str]] = {
        torch.add: "add", Tensor.add: "add", torch.mul: "mul", Tensor.mul: "mul", torch.multiply: "mul",
    }  # fmt: skip


def _with(terms: tuple[Term, ...], new: Term) -> tuple[Term, ...]:
    """``terms`` and one more; one that differs from another only in its factor joins it, as the head's own does in DoRA."""
    for i, term in enumerate(terms):
        if term.hidden_states is new.hidden_states and term.weight is new.weight:
            return (*terms[:i], term._replace(factor=term.factor + new.factor), *terms[i + 1 :])
    return (*terms, new)


def _plus(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second
