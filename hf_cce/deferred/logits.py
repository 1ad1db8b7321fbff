"""Lazy logits: what an LM head returns instead of multiplying, and what answers the model's own loss.

They record what the model's forward does to the logits and answer losses and statistics from hidden states and weight:
``hf_cce.deferred.answers`` is the one table of what is known. Anything else is asked of real logits, as the head and the
recorded operations would have made them: slower, never wrong.

Shapes: hidden_states [..., D], weight [V, D], bias [V] or None, logits [..., V].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_cce.deferred.answers import ANSWERS, CLASS_FIRST
from hf_cce.deferred.lazy_tensor import LazyTensor, StandIn, Wrapper
from hf_cce.deferred.recipe import Recipe, versions_of
from hf_cce.deferred.training_call import TrainingCall


def lazy_logits(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    call: TrainingCall | None = None,
    cast: torch.dtype | None = None,
) -> Any:
    """The logits [..., V] of a head, not multiplied out.

    Args:
        hidden_states: [..., D], what the head was given.
        weight: [V, D]; a DTensor where every process has a part of the vocabulary, and then the bias as well.
        bias: [V] or None.
        call: the training call it belongs to; carries the options of the loss and the counters.
        cast: the dtype in which autocast would have multiplied, or None.
    """
    recipe = Recipe(hidden_states, weight, bias, TrainingCall() if call is None else call, cast)
    if torch.compiler.is_compiling():
        return LazyLogitsInGraph(recipe._replace(family=[]))
    return to_wrapper(recipe)


def to_wrapper(recipe: Recipe) -> Any:
    """Lazy logits for eager code, of a recipe whose parts belong to the model's graph."""
    parts = recipe.parts
    leaves = tuple(None if x is None else x.detach().requires_grad_(x.requires_grad) for x in parts)
    versions = versions_of(*leaves)
    return LazyLogitsTensor.of(recipe.with_parts(*leaves)._replace(leaves=leaves, versions=versions, family=[]), *parts)


class LazyLogits(LazyTensor):
    """Logits [..., V] that have not been multiplied out, in either shell: see the module's docstring."""

    ANSWERS = ANSWERS
    recipe: Recipe

    def materialize(self) -> Tensor:
        """The logits [..., V] as the head and the recorded operations would have made them: same dtype, differentiable.

        Raises:
            RuntimeError: hidden states or weight were changed in place since, as ``optimizer.step()`` does.
        """
        return self._real("materialize")

    def _ask(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if self.recipe.class_first and name not in CLASS_FIRST:
            return NotImplemented
        return super()._ask(name, args, kwargs)

    def to_local(self, **_: Any) -> Any:
        """What a hook of tensor parallelism asks of the DTensor that it takes this for: every process has all the logits."""
        return self

    # Of either shell
    shape: Any
    device: Any
    _answer: Any


class LazyLogitsTensor(LazyLogits, Wrapper):
    @staticmethod
    def _leaf(value: Tensor) -> Tensor:
        return value.detach().requires_grad_(value.requires_grad)

    def _detached(self) -> Any:
        return self._alias()


class LazyLogitsInGraph(LazyLogits, StandIn):
    """Inside a compiled graph: autograd sees hidden states, weight and bias themselves, and nobody hooks the logits."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._made: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.recipe.shape if self._made is None else self._made.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.recipe.dtype

    @property
    def device(self) -> torch.device:
        return self.recipe.device

    @property
    def requires_grad(self) -> bool:
        return any(x is not None and x.requires_grad for x in self.recipe.parts)

    @property
    def _written(self) -> bool:  # type: ignore[override]
        return self._made is not None  # who has them may write into them, and a graph does not know their version

    def _leaf(self, value: Tensor) -> Tensor:
        return value

    def _detached(self) -> Any:
        return LazyLogitsInGraph(
            self.recipe.with_parts(*(None if x is None else x.detach() for x in self.recipe.parts))
        )

    def _expose(self) -> Tensor:
        return self._real("data").data

    def _derive(self, op: Any, change: Any, nonlinear: bool = False, other: Tensor | None = None) -> Any:
        self._check()
        new = LazyLogitsInGraph(change(self.recipe))
        return new if torch.is_grad_enabled() else new._detached()

    def _answer(self, compute: Any, native: Any) -> Any:
        self._check()
        return compute(self.recipe)

    def _do(self, name: str, *args: Any, **kwargs: Any) -> Any:
        result = super()._do(name, *args, **kwargs)
        if name.endswith("_") and (not name.startswith("__") or name.startswith(("__i", "__setitem"))):
            self.recipe.family.append(self)
        return result

    def _real(self, why: str) -> Tensor:
        if self._made is None:
            self._check()
            self.recipe.call.note_materialized(why)
            with torch.enable_grad():
                self._made = self.recipe.build()
        return self._made

    def _check(self) -> None:
        if any(each is not self for each in self.recipe.family):
            raise RuntimeError(
                "these deferred logits are a view of logits that were written to since; write before viewing, or use the model "
                "without CCE (remove_cce)"
            )
