"""Lazy logits: what an LM head returns instead of multiplying, and what answers the model's own loss.

They record what the model's forward does to the logits and answer losses and statistics from hidden states and weight:
``hf_cce.deferred.answers`` is the one table of what is known. Anything else is asked of real logits, as the head and the
recorded operations would have made them: slower, never wrong.

Shapes: hidden_states [..., D], weight [V, D], bias [V] or None, logits [..., V].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hf_cce.deferred.answers import ANSWERS, CLASS_FIRST
from hf_cce.deferred.lazy_tensor import (
    Answer,
    LazyTensor,
    Materialize,
    Root,
    StandIn,
    Step,
    as_tensors,
    is_alias,
    kept_by_us,
)
from hf_cce.deferred.operations import apply_ops
from hf_cce.deferred.recipe import Memory, Recipe, leaf_of, versions_of
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
    return LazyLogitsInGraph(recipe._replace(family=[])) if torch.compiler.is_compiling() else to_wrapper(recipe)


def to_wrapper(recipe: Recipe) -> Any:
    """Lazy logits for eager code, of a recipe whose parts belong to the model's graph."""
    leaves = tuple(None if x is None else leaf_of(x) for x in recipe.parts)
    own = recipe.with_parts(*leaves)._replace(leaves=leaves, versions=versions_of(*leaves), family=[])
    with kept_by_us():
        return Root.apply(LazyLogitsTensor, own, *recipe.parts)


class LazyLogits(LazyTensor):
    """Logits [..., V] that have not been multiplied out, in either shell: see ``hf_cce.deferred.lazy_tensor``."""

    ANSWERS = ANSWERS
    recipe: Recipe
    memory: Memory
    base: Any = None  # of a distribution: the logits that it is the softmax of

    # Of either shell
    shape: Any
    device: Any
    requires_grad: Any
    _derive: Any
    _answer: Any

    def materialize(self) -> Tensor:
        """The logits [..., V] as the head and the recorded operations would have made them: same dtype, differentiable.

        Raises:
            RuntimeError: hidden states or weight were changed in place since, as ``optimizer.step()`` does.
        """
        return self._real("materialize")

    @property
    def _written(self) -> bool:  # type: ignore[override]
        return self.memory.written

    def _ask(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if self.recipe.class_first and name not in CLASS_FIRST:
            return NotImplemented
        return super()._ask(name, args, kwargs)

    def _check(self) -> None:
        """Refuse to answer from a recipe that is no longer true."""
        if any(each is not self.memory and each.written for each in self.recipe.family):
            raise RuntimeError(
                "these deferred logits share memory with logits that were modified in place; modify logits before creating "
                "views, or use the model without hf_cce (remove_cce)"
            )
        self.recipe.check_fresh()

    def to_local(self, **_: Any) -> Any:
        """What a hook of tensor parallelism asks of the DTensor that it takes this for: every process has all the logits."""
        return self


class LazyLogitsTensor(LazyLogits, Tensor):
    """In eager code: a ``torch.Tensor`` without storage."""

    _made: Tensor | None = None  # the real logits with a gradient that goes back through this tensor

    def __new__(cls, recipe: Recipe) -> Any:
        shape, dtype, device = recipe.like
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.recipe, made.memory = recipe, Memory()
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        state = "not made" if self.memory.values is None else "made"
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}', {state})"

    def _detached(self) -> Any:
        """The same memory as another tensor, without a gradient."""
        new = LazyLogitsTensor(self.recipe)
        new.memory, new.base = self.memory, self.base
        return new

    def _derive(self, op: Any, change: Any, nonlinear: bool = False, other: Tensor | None = None) -> Any:
        """``op`` of these logits, recorded by ``change`` of the recipe."""
        self._check()
        with kept_by_us():
            with torch.enable_grad():
                recipe = change(self.recipe)
            return Step.apply(self, recipe, op, nonlinear, other)

    def _answer(self, compute: Callable[[Recipe], tuple[Any, ...]], native: Callable[[Tensor], tuple[Any, ...]]) -> Any:
        """``compute(recipe)``, which is what ``native`` computes from real logits; differentiable like that."""
        self._check()
        with self.recipe.call.weight_at_hand(self.recipe.weight), self.recipe.without_autocast(), kept_by_us():
            if not (self.requires_grad and torch.is_grad_enabled()):
                with torch.no_grad():
                    return compute(self.recipe)
            if any(x is not None and x.requires_grad for x in self.recipe.leaves):
                return Answer.apply(self, compute, native)
        return native(self._real("their gradient"))  # only the logits' own is wanted

    def _read(self, why: str) -> Tensor:
        """The values, without a gradient."""
        if not self._written:
            self._check()
        memory, base = self.memory, self.base
        if memory.values is None:
            with torch.inference_mode(False), torch.no_grad():
                if base is None or base._written:
                    self.recipe.call.note_materialized(why)
                    made = self.recipe.build()
                    # torch refuses writes into a view that was made without gradients, as a product with a bias is
                    memory.keep(made.data if made._is_view() else made, self.recipe.family)
                else:
                    since = self.recipe.ops[len(base.recipe.ops) :]
                    memory.keep(apply_ops(since, base._read(why)), self.recipe.family)
        assert memory.values is not None
        return memory.values

    def _real(self, why: str) -> Tensor:
        values = self._read(why)
        # Asked in the usual way of what was written to, it would ask for the real tensor
        if self._made is None and as_tensors(Tensor.requires_grad.__get__, (self,)):  # type: ignore[attr-defined]
            # Wherever they are asked for, they are what the head would have made during the call: with a gradient
            with torch.inference_mode(False), torch.enable_grad():
                self._made = Materialize.apply(self, values)
        return values if self._made is None else self._made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Where C++ asks past ``__torch_function__``: below autograd, which has recorded by now what was asked."""
        first = args[0] if args else None
        if isinstance(first, LazyLogitsTensor) and not first._written:
            if is_alias(func, args):
                return first._detached()
            if func is torch.ops.aten.clone.default:
                return LazyLogitsTensor(first.recipe.then())
        name = func._schema.name.partition("::")[2]
        written = func._schema.arguments and func._schema.arguments[0].alias_info
        if isinstance(first, LazyLogitsTensor) and written is not None and written.is_write:
            raise NotImplementedError(f"{name} on deferred logits, from C++; use outputs.logits.materialize()")
        real = lambda x: x._read(name) if isinstance(x, LazyLogitsTensor) else x  # noqa: E731
        return func(*tree_map(real, args), **tree_map(real, kwargs or {}))


class LazyLogitsInGraph(LazyLogits, StandIn):
    """Inside a compiled graph: autograd sees hidden states, weight and bias themselves, and nobody hooks the logits."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.memory = recipe, Memory(in_graph=True)
        _, self.dtype, self.device = recipe.like

    @property
    def shape(self) -> torch.Size:
        return self.recipe.like.shape if self.memory.values is None else self.memory.values.shape

    @property
    def requires_grad(self) -> bool:
        return any(x is not None and x.requires_grad for x in self.recipe.parts)

    def _detached(self) -> Any:
        parts = (None if x is None else x.detach() for x in self.recipe.parts)
        return LazyLogitsInGraph(self.recipe.with_parts(*parts))

    def _derive(self, op: Any, change: Any, nonlinear: bool = False, other: Tensor | None = None) -> Any:
        self._check()
        new = LazyLogitsInGraph(change(self.recipe))
        return new if torch.is_grad_enabled() else new._detached()

    def _answer(self, compute: Any, native: Any) -> Any:
        self._check()
        with self.recipe.without_autocast():
            return compute(self.recipe)

    def _do(self, name: str, *args: Any, **kwargs: Any) -> Any:
        result = super()._do(name, *args, **kwargs)
        if name.endswith("_") and (not name.startswith("__") or name.startswith(("__i", "__setitem"))):
            self.recipe.family.append(self.memory)
        return result

    def _real(self, why: str) -> Tensor:
        if self.memory.values is None:
            self._check()
            self.recipe.call.note_materialized(why)
            with torch.enable_grad():
                self.memory.values = self.recipe.build()
        return self.memory.values
