"""Deferred output of an LM head with adapters: a sum of products, which is turned into one linear head.

LoRA and similar adapters add products of output size V to the product of the head, and some scale a product by a vector [V]. The
sum is again one linear head: Σ fᵢ ⊙ (xᵢ Wᵢᵀ) + b = [x₁, x₂ …] [f₁ ⊙ W₁, f₂ ⊙ W₂ …]ᵀ + b.
``SumOfProducts`` collects the terms while the head's forward runs. At its end, ``deferred`` concatenates them to one input and
one weight, through which autograd differentiates. Operations that are not supported use the full logits.

Shapes: xᵢ [..., Dᵢ], Wᵢ [V, Dᵢ], fᵢ [V] or a number, b [V] or None.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_cce.deferred.lazy_tensor import TensorProxy
from hf_cce.deferred.logits import lazy_logits
from hf_cce.deferred.operations import as_vocab_vector, cast_targets, is_number
from hf_cce.deferred.training_call import TrainingCall

Factor = Tensor | float  # [V], or one number for all vocabulary entries


class Term(NamedTuple):
    """factor ⊙ (hidden_states · weightᵀ). It is not sliced: Dynamo of torch 2.8 cannot trace that."""

    hidden_states: Tensor  # [..., D]
    weight: Tensor  # [V, D]
    factor: Factor = 1.0


class SumOfProducts(TensorProxy):
    """Placeholder for the sum of ``terms`` and ``bias``, with the shape, dtype and device that torch would give it."""

    _deferred_logits: Any = None

    def __init__(
        self,
        terms: tuple[Term, ...],
        bias: Tensor | None,
        dtype: torch.dtype,
        call: TrainingCall,
        cast: torch.dtype | None,
    ) -> None:
        self.terms, self.bias, self.dtype, self.call, self.cast = terms, bias, dtype, call, cast
        hidden_states, weight = terms[0].hidden_states, terms[0].weight
        self.shape = torch.Size((*hidden_states.shape[:-1], weight.shape[0]))
        self.device = hidden_states.device

    @property
    def requires_grad(self) -> bool:
        return self.deferred().requires_grad

    @property
    def _is_stale(self) -> bool:  # type: ignore[override]
        """True if the full logits were modified in place (PEFT's aLoRA does so through a view), so ``terms`` are stale."""
        return self._deferred_logits is not None and self._deferred_logits._is_stale

    def deferred(self) -> Any:
        """Return the deferred logits of one head that computes the sum."""
        if self._deferred_logits is None:
            self._deferred_logits = self._merge_terms()
        return self._deferred_logits

    def _merge_terms(self) -> Any:
        terms = [term for term in self.terms if isinstance(term.factor, Tensor) or term.factor != 0.0] or self.terms[:1]
        inputs: list[Tensor] = []
        weights: list[Tensor] = []
        hidden_dtype, weight_dtype = terms[0].hidden_states.dtype, terms[0].weight.dtype
        for term in terms:
            x, weight = term.hidden_states.to(hidden_dtype), term.weight
            if isinstance(term.factor, Tensor):
                weight = weight * term.factor.unsqueeze(-1)
            elif term.factor != 1.0:
                x = x * term.factor
            weight = weight.to(weight_dtype)
            same = [i for i, each in enumerate(inputs) if each is x]
            if same:  # LoHa and LoKr multiply the same input by another weight
                weights[same[0]] = weights[same[0]] + weight
            else:
                inputs.append(x)
                weights.append(weight)
        x, weight = (inputs[0], weights[0]) if len(inputs) == 1 else (torch.cat(inputs, -1), torch.cat(weights, 1))
        bias = None if self.bias is None else self.bias.to(weight_dtype)
        return lazy_logits(x, weight, bias, call=self.call, cast=self.cast).to(self.dtype)

    def _replace(self, terms: tuple[Term, ...], bias: Tensor | None, dtype: torch.dtype) -> SumOfProducts:
        return SumOfProducts(terms, bias, dtype, self.call, self.cast)

    def _materialize(self, why: str) -> Tensor:
        self.call.unknown_adapter = True
        return self.deferred()._materialize(why)


def _to(x: SumOfProducts, *args: Any, **kwargs: Any) -> Any:
    targets = cast_targets(args, kwargs)
    if targets is None or any(isinstance(each, torch.device) and each != x.device for each in targets):
        return x.deferred().to(*args, **kwargs)
    dtypes = [each for each in targets if isinstance(each, torch.dtype)]
    return x._replace(x.terms, x.bias, dtypes[-1] if dtypes else x.dtype)


def _add(x: SumOfProducts, other: Any, **kwargs: Any) -> Any:
    """Add another sum for the same tokens, or a bias [V]."""
    alike = isinstance(other, SumOfProducts) and x.shape == other.shape and x.cast == other.cast
    if alike and not kwargs and not other._is_stale:
        terms = x.terms
        for term in other.terms:
            terms = _add_term(terms, term)
        return x._replace(terms, _add_optional(x.bias, other.bias), torch.promote_types(x.dtype, other.dtype))
    bias = as_vocab_vector(other, x)
    if bias is None or kwargs:
        return NotImplemented
    return x._replace(x.terms, _add_optional(x.bias, bias), torch.promote_types(x.dtype, bias.dtype))


def _sub(x: SumOfProducts, other: Any, **kwargs: Any) -> Any:
    """Subtract another sum, or a bias [V]: DoRA subtracts the head's own bias before it scales."""
    if isinstance(other, SumOfProducts):
        return _add(x, _mul(other, -1.0), **kwargs)
    subtracted = as_vocab_vector(other, x)
    if subtracted is None or kwargs:
        return NotImplemented
    bias = None if other is x.bias else _add_optional(x.bias, -subtracted)
    return x._replace(x.terms, bias, torch.promote_types(x.dtype, subtracted.dtype))


def _mul(x: SumOfProducts, other: Any) -> Any:
    """Multiply by a number, a tensor with one element, or a factor [V]."""
    factor = float(other) if is_number(other) else as_vocab_vector(other, x)
    if isinstance(other, Tensor) and other.shape == (1,) and other.is_floating_point():
        factor = other
    if factor is None:
        return NotImplemented
    terms = tuple(Term(term.hidden_states, term.weight, term.factor * factor) for term in x.terms)
    dtype = x.dtype if is_number(other) else torch.promote_types(x.dtype, other.dtype)
    return x._replace(terms, None if x.bias is None else x.bias * factor, dtype)


def _div(x: SumOfProducts, other: Any) -> Any:
    return _mul(x, 1 / other) if isinstance(other, Tensor) or other else NotImplemented


def _iadd(x: SumOfProducts, other: Any) -> Any:
    """Add to ``x`` itself, so that every reference to ``x`` sees the sum."""
    made = _add(x, other) if x._deferred_logits is None else NotImplemented
    if made is NotImplemented or made.dtype != x.dtype:
        return NotImplemented
    x.terms, x.bias = made.terms, made.bias
    return x


SumOfProducts.HANDLERS = {
    "to": _to, "float": lambda x: _to(x, torch.float32), "sub": _sub, "subtract": _sub, "__sub__": _sub,
    "clone": lambda x: x._replace(x.terms, x.bias, x.dtype), "zeros_like": lambda x: _mul(x, 0.0), "__iadd__": _iadd,
    **dict.fromkeys(("div", "true_divide", "__truediv__"), _div),
    **dict.fromkeys(("add", "__add__", "__radd__"), _add),
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), _mul),
}  # fmt: skip


def _add_term(terms: tuple[Term, ...], new: Term) -> tuple[Term, ...]:
    """Append ``new`` to ``terms``, or add its factor to the term with the same input and weight (in DoRA, the head's own)."""
    for i, term in enumerate(terms):
        if term.hidden_states is new.hidden_states and term.weight is new.weight:
            return (*terms[:i], Term(new.hidden_states, new.weight, term.factor + new.factor), *terms[i + 1 :])
    return (*terms, new)


def _add_optional(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second
