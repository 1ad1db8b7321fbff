"""Deferred logits: an LM head returns them instead of its product, and the model's own loss is computed from them.

They record what the model's forward does to the logits, and compute losses and statistics from hidden states and weight.
``hf_cce.deferred.handlers`` is the table of supported operations. All others compute the full logits, as the head would have.

Shapes: hidden_states [..., D], weight [V, D], bias [V] or None, logits [..., V].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from hf_cce.deferred.handlers import CLASS_FIRST, HANDLERS, ON_TERMS
from hf_cce.deferred.lazy_tensor import (
    FusedResult,
    HeadOutput,
    LazyTensor,
    Materialized,
    RecordedOp,
    TensorMeta,
    TensorProxy,
    WrittenLogits,
    call_as_tensors,
    is_alias,
    is_watched,
    private_saved_tensors,
    without_storage,
)
from hf_cce.deferred.operations import apply_ops
from hf_cce.deferred.recipe import Recipe, SharedStorage
from hf_cce.deferred.training_call import TrainingCall
from hf_cce.head_checks import transformed

# Methods that give the address of a tensor to a kernel or another library
_EXPOSE_MEMORY = {"data_ptr", "numpy", "__array__", "__dlpack__", "__cuda_array_interface__", "untyped_storage"}


def lazy_logits(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    call: TrainingCall | None = None,
    cast: torch.dtype | None = None,
) -> Any:
    """Return the deferred logits [..., V] of a head.

    Args:
        weight: [V, D]; a DTensor if the vocabulary is sharded over processes, and then the bias as well.
        call: the training call that they belong to; holds the options of the loss and the counters.
        cast: the dtype in which autocast would compute the product, or None.
    """
    recipe = Recipe(hidden_states, weight, bias, TrainingCall() if call is None else call, cast)
    return LazyLogitsInGraph(recipe.replace(aliases=[])) if torch.compiler.is_compiling() else to_eager(recipe)


def to_eager(recipe: Recipe) -> Any:
    """Return ``LazyLogitsTensor`` for a recipe whose tensors are part of the model's autograd graph."""
    with private_saved_tensors():
        head_output = HeadOutput.apply(LazyLogitsTensor, recipe.replace(ops=()).with_leaves(), *recipe.operands)
    return apply_ops(recipe.ops, head_output)  # those that a graph has recorded


class LazyLogits(LazyTensor):
    """Deferred logits [..., V]. See ``hf_cce.deferred.lazy_tensor`` for the two types."""

    HANDLERS = HANDLERS
    recipe: Recipe
    shared_storage: SharedStorage
    last_logsumexp: tuple[Tensor, int | None, Any] | None = None  # [...], its version and the token of its ``grad_fn``
    has_results = False  # something was computed from these logits, which a later change in place must not affect

    # Defined by both subclasses
    shape: Any
    _compute_fused: Any

    def materialize(self) -> Tensor:
        """Return the logits [..., V] as head and recorded operations would have computed them: same dtype, differentiable.

        Raises:
            RuntimeError: hidden states or weight were modified in place since, as by ``optimizer.step()``.
        """
        return self._materialize("materialize")

    @property
    def _is_stale(self) -> bool:  # type: ignore[override]
        return self.shared_storage.is_modified or self.shared_storage.is_exposed

    def _call_handler(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        are_terms = self.recipe.meaning.kind == "kl_div"
        supported = CLASS_FIRST if self.recipe.class_first else ON_TERMS if are_terms else HANDLERS
        if name not in supported or transformed():
            return NotImplemented
        return super()._call_handler(name, args, kwargs)

    def _check_views(self) -> None:
        """Raise a RuntimeError if logits that may share memory with these were modified in place."""
        if any(each is not self.shared_storage and each.is_modified for each in self.recipe.aliases):
            raise RuntimeError(
                "these deferred logits may share memory with logits that were modified in place; modify logits before "
                "creating views, or use the model without hf_cce (remove_cce)"
            )

    def _check_fresh(self) -> None:
        self._check_views()
        self.recipe.check_fresh()

    def to_local(self, **_: Any) -> Any:
        """Return self. Hooks of tensor parallelism call this as on a DTensor; every process has all the logits."""
        return self


class LazyLogitsTensor(LazyLogits, Tensor):
    """Deferred logits in eager code: a ``torch.Tensor`` without storage."""

    _differentiable_values: Tensor | None = None  # the full logits, whose gradient flows back through this tensor
    _version_of_values = 0  # the ``_own_version`` that they belong to
    _is_written = False  # the gradient of this tensor flows to them instead, see ``WrittenLogits``
    factors: tuple[Any, ...] = ()  # the two tensors whose product this is, or none
    meta: TensorMeta
    # The properties of torch.Tensor would call __torch_function__. Stale logits may have another shape after ``unsqueeze_``.
    shape = property(lambda self: Tensor.shape.__get__(self) if self._is_stale else self.meta.shape)  # type: ignore[attr-defined]
    dtype = property(lambda self: self.meta.dtype)
    device = property(lambda self: self.meta.device)
    ndim = property(lambda self: len(self.shape))

    def __new__(cls, recipe: Recipe) -> Any:
        meta = recipe.meta
        made = without_storage(cls, meta)
        made.recipe, made.meta, made.shared_storage = recipe, meta, SharedStorage()
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        state = "deferred" if self.shared_storage.values is None else "materialized"
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}', {state})"

    def _detached(self) -> Any:
        """Return a tensor that shares the storage, without a gradient."""
        new = LazyLogitsTensor(self.recipe)
        new.meta, new.shared_storage = self.meta, self.shared_storage
        return new

    def _derive(self, op: Any, change: Any, nonlinear: bool = False) -> Any:
        """Return the result of ``op`` as deferred logits; ``change`` records the operation in the recipe."""
        self._check_fresh()
        self.has_results = True
        with private_saved_tensors():
            with torch.enable_grad():
                recipe = change(self.recipe)
            return RecordedOp.apply(self, recipe, op, nonlinear)

    def _write(self, recipe: Recipe, op: Any = None) -> Any:
        """Change these logits in place to those of ``recipe``; ``op``, if it affects their gradient, is linear."""
        self._check_fresh()
        if op is not None:
            RecordedOp.apply(self, recipe, op, False, True)
        self.recipe.aliases.append(SharedStorage(torch.empty(0), version=-1))  # marks existing views as stale
        self.recipe, self.shared_storage = recipe, SharedStorage()
        return self

    def _compute_fused(
        self,
        compute: Callable[[Recipe], tuple[Any, ...]],
        native: Callable[[Tensor], tuple[Any, ...]],
        by_token: bool = False,
    ) -> Any:
        """Return ``compute(recipe)``, differentiable like ``native(logits)``, which computes the same from full logits.

        With ``by_token``, ``native`` can compute the results of some tokens from their logits.
        """
        self._check_fresh()
        self.has_results = True
        recipe = self.recipe
        with recipe.call.unsharded(recipe.weight, recipe.bias), recipe.without_autocast(), private_saved_tensors():
            if not (self.requires_grad and torch.is_grad_enabled()):
                with torch.no_grad():  # cloned, because the caller may change them, and ``compute`` may keep them
                    return tuple(None if x is None else x.detach().clone() for x in compute(recipe))
            if any(x is not None and x.requires_grad for x in recipe.leaves):
                recipe.call.has_fused_result = True
                return FusedResult.apply(self, compute, native, by_token)
        return native(self._materialize("their gradient"))  # only the logits themselves require a gradient

    def _materialize_values(self, why: str) -> Tensor:
        """Return the full logits, without a gradient."""
        if not self._is_stale:
            self._check_views()
        storage, source = self.shared_storage, self
        while source is not None and source.recipe.meaning.kind != "z":  # softmax and log_softmax share the full logits
            source = source.parent
        if storage.values is None:
            self.recipe.check_fresh()
            with torch.inference_mode(False), torch.no_grad():
                if source is None or source is self or source._is_stale:
                    self.recipe.call.note_materialized(why)
                    values = self.recipe.build()
                    # torch rejects writes into a view created under no_grad; F.linear with a bias may return one
                    values = values.data if values._is_view() else values
                else:
                    since = self.recipe.ops[len(source.recipe.ops) :]
                    values = apply_ops(since, source._materialize_values(why))
                for index, known in storage.known:  # see ``_repeat_known_values``
                    values.scatter_(-1, index.to(values.device), known.to(values.device, values.dtype))
                storage.values, storage.version = values, values._version
                self.recipe.aliases.append(storage)
        storage.is_exposed = storage.is_exposed or why in _EXPOSE_MEMORY
        return storage.values

    def _materialize(self, why: str) -> Tensor:
        if transformed():
            raise RuntimeError(
                "deferred logits of a training call were used under a transform of torch.func or in forward-mode AD; use the "
                "result of outputs.logits.materialize(), called outside of it"
            )
        if self.factors and self.shared_storage.values is None and not is_watched(self):
            return self._multiply_factors(why)
        values = self._materialize_values(why)
        # Not self.requires_grad: after an in-place write, that would ask for the full logits again
        requires_grad = call_as_tensors(Tensor.requires_grad.__get__, (self,))  # type: ignore[attr-defined]
        if requires_grad and (self._differentiable_values is None or self._version_of_values != self._own_version()):
            # Differentiable even under no_grad, like logits that the head had computed during the call
            with torch.inference_mode(False), torch.enable_grad():
                made = Materialized.apply(self, values)
            if self._is_leaf():
                return made
            self._differentiable_values, self._version_of_values = made, self._own_version()
            self._is_written = False
        return values if self._differentiable_values is None else self._differentiable_values

    def _multiply_factors(self, why: str) -> Tensor:
        """Materialize a product from its factors, which get its gradient: it may nearly cancel others, as in KL divergences."""
        factors, self.factors = self.factors, ()
        if any(x._is_stale for x in factors):
            return self._materialize(why)
        with torch.inference_mode(False), torch.enable_grad():
            made = factors[0]._materialize(why) * factors[1]._materialize(why)
        self.shared_storage.values, self.shared_storage.version = made.detach(), made._version
        self.recipe.aliases.append(self.shared_storage)
        if made.requires_grad:
            self._differentiable_values, self._version_of_values, self._is_written = made, self._own_version(), True
        return made

    def _follow_write(self, values: Tensor) -> Any:
        """Take over the gradient of ``values``, for autograd functions that get this tensor; return it, as torch does."""
        if values.requires_grad:
            WrittenLogits.apply(self, values)  # in no_grad, this only counts the write
        if values.requires_grad and not self._is_leaf():
            self._differentiable_values, self._version_of_values = values, self._own_version()
            self._is_written = self._is_written or torch.is_grad_enabled()
        return self

    def _gradient_owner(self) -> Any:
        if not self._is_stale:
            self._check_views()
        written = self._is_written and self._version_of_values == self._own_version()
        return self._differentiable_values if written else self

    def _is_leaf(self) -> bool:
        """Return True for a leaf, which must not hold values whose graph leads to it: a reference cycle that is never freed."""
        return call_as_tensors(Tensor.is_leaf.__get__, (self,))  # type: ignore[attr-defined]

    def _own_version(self) -> int:
        """Return the version of this tensor, which only changes if an autograd function marks it as dirty."""
        return call_as_tensors(Tensor._version.__get__, (self,))  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Handle calls from C++, which bypass ``__torch_function__``. Autograd has recorded them already."""
        first = args[0] if args else None
        if isinstance(first, LazyLogitsTensor) and not first._is_stale:
            if is_alias(func, args):
                return first._detached()
            if func is torch.ops.aten.clone.default:
                copied = LazyLogitsTensor(first.recipe.with_ops())
                copied.meta = first.meta
                return copied
        name = func._schema.name.partition("::")[2]
        written = func._schema.arguments and func._schema.arguments[0].alias_info
        if isinstance(first, LazyLogitsTensor) and written is not None and written.is_write:
            raise NotImplementedError(f"{name} on deferred logits, from C++; use outputs.logits.materialize()")
        # As in ``_call_on_values``, for collectives that do not ask for ``__torch_function__``
        collected = tree_leaves(first) if func.namespace == "c10d" and name.endswith("_") else []
        args, kwargs = tree_map_only(LazyLogitsTensor, lambda x: x._materialize_values(name), (args, kwargs or {}))
        result = func(*args, **kwargs)
        for x in collected:
            if isinstance(x, LazyLogitsTensor):
                torch.autograd.graph.increment_version(x._materialize_values(name))
        return result


class LazyLogitsInGraph(LazyLogits, TensorProxy):
    """Deferred logits in a compiled graph: autograd sees hidden states, weight and bias directly; the logits have no hooks."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.shared_storage = recipe, SharedStorage(in_graph=True)
        _, self.dtype, self.device = recipe.meta

    @property
    def shape(self) -> torch.Size:
        return self.recipe.meta.shape if self.shared_storage.values is None else self.shared_storage.values.shape

    @property
    def requires_grad(self) -> bool:
        return any(x is not None and x.requires_grad for x in self.recipe.operands)

    def _detached(self) -> Any:
        operands = (None if x is None else x.detach() for x in self.recipe.operands)
        return LazyLogitsInGraph(self.recipe.with_operands(*operands))

    def _derive(self, op: Any, change: Any, nonlinear: bool = False) -> Any:
        self._check_fresh()
        new = LazyLogitsInGraph(change(self.recipe))
        return new if torch.is_grad_enabled() else new._detached()

    def _compute_fused(self, compute: Any, native: Any, by_token: bool = False) -> Any:
        self._check_fresh()
        with self.recipe.without_autocast():
            return compute(self.recipe)

    def _call_method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        result = super()._call_method(name, *args, **kwargs)
        if name.endswith("_") and (not name.startswith("__") or name.startswith(("__i", "__setitem"))):
            self.recipe.aliases.append(self.shared_storage)
        return result

    def _materialize(self, why: str) -> Tensor:
        if self.shared_storage.values is None:
            self._check_fresh()
            self.recipe.call.note_materialized(why)
            with torch.enable_grad():
                self.shared_storage.values = self.recipe.build()
        return self.shared_storage.values
