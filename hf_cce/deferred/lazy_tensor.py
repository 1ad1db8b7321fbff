"""Lazy tensors: placeholders without storage for logits that have not been computed.

In eager code a lazy tensor is a ``torch.Tensor`` subclass with shape, dtype, device and a ``grad_fn``. In compiled graphs, where
Dynamo cannot create such subclasses, and between the layers of an LM head it is a plain object, ``TensorProxy``. Both share one
table of supported operations. All other operations use the real tensor, which is computed once.

In the backward pass, a fused loss returns a ``LazyGrad`` as the gradient of the logits: a list of the losses it comes from.
Autograd passes it on like any tensor, up to ``HeadOutput``, the ``grad_fn`` of the head's output, which computes the gradients of
hidden states and weight. Reading a ``LazyGrad`` computes the dense gradient.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import enable_reentrant_dispatch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from hf_cce.sharded import as_replicated, full_logits, is_dtensor
from hf_cce.spec import accumulation_dtype

# Handlers of operations whose second argument is the lazy tensor, by the name of the operation
_REFLECTED = {"add": "add", "mul": "mul", "multiply": "mul", "broadcast_tensors": "rbroadcast_tensors"}
_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim"}  # other names that torch accepts
# Properties that read the values of a tensor. All other properties, and the methods in _METADATA_METHODS, need only metadata.
_VALUE_PROPERTIES = {"data", "T", "mT", "H", "mH", "real", "imag", "__cuda_array_interface__"}
_METADATA_METHODS = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex",
    "element_size", "__len__", "get_device", "is_inference", "storage_offset", "__hash__", "is_same_size", "is_neg",
    "is_conj", "register_hook", "retain_grad", "requires_grad_", "register_post_accumulate_grad_hook", "_is_view",
}  # fmt: skip
MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: the hidden states or the "
    "weight of the LM head, its logits, or the labels"
)
BYPASSED = (
    "these probabilities get no gradient from their product with logits, which was computed from the logits directly; register "
    "hooks before the product, or use outputs.logits.materialize()"
)
_AUTOGRAD = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)  # these follow the graph and read no values
_GRADIENT_METHODS = {"grad", "retain_grad", "register_hook"}
_ATEN = torch.ops.aten
_ALIASING_OPS = {_ATEN.detach.default, _ATEN.alias.default, _ATEN.view_as.default}


class LazyTensor:
    """Placeholder for a floating-point tensor."""

    # By name of a torch function; NotImplemented falls back to the real tensor
    HANDLERS: ClassVar[dict[str, Callable[..., Any]]] = {}
    parent: Any = None  # the lazy tensor that this one was computed from entry by entry, if any
    is_bypassed = False  # a product was computed from the logits instead of from this, so this gets no gradient
    _is_stale = False  # the real tensor was modified in place, so what was recorded is stale

    def _materialize(self, why: str) -> Tensor:
        """Return the real tensor; ``why`` names the operation that needs it."""
        raise NotImplementedError

    def _follow_write(self, values: Tensor) -> Any:
        """Return the result of an operation that has modified ``values``, the real tensor, in place."""
        return values

    def _gradient_owner(self) -> Any:
        """Return the tensor that receives all gradients of this one."""
        return self

    def _call_handler(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        handler = self.HANDLERS.get(name)
        if handler is None or self._is_stale or "out" in kwargs:
            return NotImplemented
        if len(kwargs) > 0:
            kwargs = {_NUMPY_NAMES.get(key, key): value for key, value in kwargs.items()}
            if not torch.compiler.is_compiling() and not _accepts(handler, frozenset(kwargs)):
                return NotImplemented
        return handler(self, *args, **kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if issubclass(cls, Tensor) and torch.compiler.is_dynamo_compiling():
            return _call_in_eager(func, args, kwargs or {})
        kwargs = kwargs or {}
        if "input" in kwargs and len(args) == 0:
            args, kwargs = (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}
        name = name_of(func)
        if name == "matmul" and torch.compiler.is_compiling():
            args = _undo_matmul_swap(args)
        first = args[0] if len(args) > 0 else None
        is_wrapper = isinstance(first, LazyTensor) and isinstance(first, Tensor) and not first._is_stale
        changes_grad = name in ("__set__", "__delete__") and _property_name(func) == "grad"
        if func in _AUTOGRAD or name in _GRADIENT_METHODS or changes_grad:
            if any(isinstance(x, LazyTensor) and x.is_bypassed for x in _with_wanted_gradient(name, args, kwargs)):
                raise RuntimeError(BYPASSED)
            args, kwargs = tree_map_only(LazyTensor, lambda x: x._gradient_owner(), (args, kwargs))
            return call_as_tensors(func, args, kwargs)
        if is_wrapper and _is_metadata_query(func):
            return call_as_tensors(func, args, kwargs)
        if is_wrapper and name in ("detach_", "__set__"):
            raise RuntimeError("deferred logits cannot be changed by detach_() or .data = …; use logits.materialize()")
        result = NotImplemented
        if isinstance(first, LazyTensor):
            result = first._call_handler(name, args[1:], kwargs)
        elif len(args) == 2 and isinstance(args[1], LazyTensor) and name in _REFLECTED:
            result = args[1]._call_handler(_REFLECTED[name], (first,), kwargs)
        if result is NotImplemented:
            if torch.compiler.is_compiling():
                return func(*materialize_all(args, name), **materialize_all(kwargs, name))
            result = _call_on_values(func, name, args, kwargs)
        return result


def _with_wanted_gradient(name: str, args: Any, kwargs: Any) -> list[Any]:
    """Return the tensors whose gradient the function ``name`` of autograd returns, keeps or gives to a hook."""
    if name in ("register_hook", "retain_grad"):
        return [args[0]]
    return tree_leaves((args[1:2] if name == "grad" else (), kwargs.get("inputs")))


@functools.cache
def _accepts(handler: Callable[..., Any], keywords: frozenset[str]) -> bool:
    kinds = {name: parameter.kind for name, parameter in inspect.signature(handler).parameters.items()}
    named = {name for name, kind in kinds.items() if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return keywords <= named or inspect.Parameter.VAR_KEYWORD in kinds.values()


def _call_on_values(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Call ``func`` with the real tensors of all lazy ones, which follow if they are modified in place."""
    used: list[tuple[Any, Tensor, int | None]] = []

    def values_of(x: Any) -> Tensor:
        values = x._materialize(name)
        used.append((x, values, version_of(values)))
        return values

    # Collectives write into their first argument, but torch's version counters do not show it
    is_collective = getattr(func, "__module__", None) == "torch.distributed.distributed_c10d"
    collected = tree_leaves(args[:1]) if is_collective and name not in ("send", "isend", "gather") else []
    args, kwargs = tree_map_only(LazyTensor, values_of, (args, kwargs))
    result = func(*args, **kwargs)
    for x, values, version in used:
        if any(x is each for each in collected):
            torch.autograd.graph.increment_version(values)
        if version != version_of(values):
            followed = x._follow_write(values)
            result = followed if result is values else result
    return result


@_disable_dynamo  # torch.compiler.disable would load Dynamo at import, which takes a second
def _call_in_eager(func: Any, args: Any, kwargs: Any) -> Any:
    """Call ``func`` outside of the graph: a compiled function that takes eager logits would lose their gradient."""
    return func(*args, **kwargs)


def _undo_matmul_swap(args: Any) -> Any:
    """Undo Dynamo's swap of ``x @ matrix``, which it calls as ``matrix.matmul(x)`` if ``x`` is not a ``torch.Tensor``."""
    if len(args) != 2 or isinstance(args[0], LazyTensor) or args[0].dim() != 2 or not isinstance(args[1], TensorProxy):
        return args
    matrix, x = args
    swapped = x.shape[-1] == matrix.shape[0] and (x.ndim > 2 or x.shape[0] != matrix.shape[1])
    return (x, matrix) if swapped else args


def call_as_tensors(func: Any, args: Any, kwargs: Any = None) -> Any:
    """Call ``func`` as on plain tensors, without the ``__torch_function__`` of its arguments."""
    return Tensor.__torch_function__(func, (), args, kwargs)


def name_of(func: Any) -> str:
    name = getattr(func, "__name__", "an operation")
    return _property_name(func) if name == "__get__" else name


def _property_name(func: Any) -> str:
    """Return the name of the property that ``func`` gets, sets or deletes; one written in Python has no name before 3.13."""
    found: Any = func.__self__
    named: Any = found.fget if isinstance(found, property) else found
    return str(named.__name__)


def _is_metadata_query(func: Any) -> bool:
    """Return True if ``func`` reads only metadata of its first argument, or is an OpOverload, as a TorchDispatchMode calls it."""
    if getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__"):
        return _property_name(func) not in _VALUE_PROPERTIES
    return getattr(func, "__name__", "") in _METADATA_METHODS or isinstance(func, torch._ops.OpOverload)


def materialize_all(value: Any, why: str) -> Any:
    """Return ``value`` with every lazy tensor replaced by its real tensor, also inside lists, tuples and dictionaries."""
    return tree_map(lambda x: x._materialize(why) if isinstance(x, LazyTensor) else x, value)


class TensorProxy(LazyTensor):
    """Plain object with the interface of a tensor. Subclasses define ``_materialize``, ``shape``, ``dtype`` and ``device``."""

    layout = torch.strided
    is_leaf = is_sparse = is_nested = is_quantized = False
    shape: Any
    dtype: Any
    device: Any
    requires_grad: Any

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        return True

    def is_contiguous(self, *_: Any, **__: Any) -> bool:
        return True

    def __len__(self) -> int:
        return self.shape[0]

    def _call_method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        result = self._call_handler(name, args, kwargs)
        if result is NotImplemented:
            method = getattr(self._materialize(name), name)
            result = method(*materialize_all(args, name), **materialize_all(kwargs, name))
        return result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        is_method = callable(getattr(Tensor, name))
        return functools.partial(self._call_method, name) if is_method else getattr(self._materialize(name), name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._materialize("iteration"))

    def __hash__(self) -> int:
        return id(self)


def _special_method(name: str) -> Callable[..., Any]:
    """Return a special method. Python looks these up on the class, never in ``__getattr__``."""
    return lambda self, *args: self._call_method(name, *args)


# fmt: off
_SPECIAL_METHODS = (
    "abs", "add", "and", "array", "bool", "contains", "deepcopy", "eq", "float", "floordiv", "ge", "getitem", "gt", "iadd",
    "iand", "ifloordiv", "imod", "imul", "index", "int", "invert", "ior", "ipow", "isub", "itruediv", "ixor", "le", "lt",
    "matmul", "mod", "mul", "ne", "neg", "or", "pos", "pow", "radd", "reduce_ex", "rfloordiv", "rmatmul", "rmul", "rpow",
    "rsub", "rtruediv", "setitem", "sub", "truediv", "xor",
)
# fmt: on
for _name in _SPECIAL_METHODS:
    setattr(TensorProxy, f"__{_name}__", _special_method(f"__{_name}__"))


def private_saved_tensors() -> Any:
    """Return a context that saves tensors without calling outer hooks (a checkpoint counts calls) and rejects modified ones."""
    return saved_tensors_hooks(_pack, _unpack_unmodified)


def _pack(x: Tensor) -> tuple[Tensor, int | None]:
    """Return what to save. A saved output that refers to its own ``grad_fn`` would be a cycle that is never freed."""
    return x if x.grad_fn is None else x.detach(), version_of(x)


def _unpack_unmodified(saved: tuple[Tensor, int | None]) -> Tensor:
    if saved[1] != version_of(saved[0]):
        raise RuntimeError(MODIFIED)
    return saved[0]


def version_of(x: Tensor | None) -> int | None:
    """Return the version counter of ``x``; None for tensors without one, and for lazy tensors, which have no values to modify."""
    return None if x is None or isinstance(x, LazyTensor) or x.is_inference() else x._version


def is_watched(x: Any) -> bool:
    """Return True if ``x`` has hooks or keeps its gradient."""
    return isinstance(x, Tensor) and (bool(x._backward_hooks) or x.retains_grad)


def is_alias(func: Any, args: Any) -> bool:
    """Return True if the operator ``func`` returns its first argument unchanged, on the same memory."""
    return func in _ALIASING_OPS or (func is _ATEN.view.default and list(args[1]) == list(args[0].shape))


def compute_logits(hidden_states: Tensor, weight: Tensor, bias: Tensor | None, cast: torch.dtype | None) -> Tensor:
    """Compute the logits [..., V], in the autocast dtype ``cast`` if there is one; call with autocast disabled."""
    if cast is not None:
        hidden_states, weight, bias = hidden_states.to(cast), weight.to(cast), None if bias is None else bias.to(cast)
    return full_logits(F.linear(as_replicated(hidden_states, weight), weight, bias))


class PendingLoss(NamedTuple):
    """A fused loss in the backward pass, before the gradients of hidden states and weight are computed."""

    results: list[Tensor]
    upstream: list[Tensor]  # the gradients of ``results``
    boundaries: tuple[Tensor, ...]  # inputs of the graph of ``results``, see ``graph_boundary``
    sources: tuple[Tensor, ...]  # the tensor that each boundary stands for
    leaves: tuple[Tensor | None, ...]  # hidden states, weight and bias: inputs of the graphs of results and sources
    call: Any
    is_per_token: bool  # not summed over the tokens


DENSE_GRAD_BYTES = 128 << 20  # of logits in float32 at a time, if their gradient is computed for some tokens at a time
_ORIGIN = "hf_cce.origin"  # key of the metadata of a ``grad_fn``


@dataclass
class SourceGrad:
    """A tensor at which ``graph_boundary`` has cut the graph, and the sum of the gradients of its copies, or None."""

    source: Tensor
    grad: Tensor | None = None

    def add(self, grad: Tensor | None) -> None:
        self.grad = _sum(self.grad, grad)


def graph_boundary(recipe: Any, source: Tensor, origin: Any, name: str) -> Tensor:
    """Cut the graph at ``source``: return a leaf with its values, from which a result is computed.

    The backward pass first computes the gradients of all such leaves. ``origin.merge`` may move them from one source to another.
    Then it computes those of the sources, which have a ``name``, for one ``origin`` at a time.
    """
    if not source.requires_grad or not recipe.leaves:  # no leaves: these logits are, or come from, a compiled graph
        return source
    source.grad_fn.metadata[_ORIGIN] = origin, name  # type: ignore[union-attr, index]
    new = source.detach().requires_grad_()
    recipe.call.boundaries.append((new, source))
    return new.view_as(new)  # a graph that refers to ``new``, even if this is the result


def _leaf_gradients(losses: list[PendingLoss]) -> list[Tensor | None]:
    """Return the gradients of the leaves, which all ``losses`` share. One backward pass computes what they have in common."""
    leaves, call = losses[0].leaves, losses[0].call
    wanted = [x for x in leaves if x is not None and x.requires_grad]
    sums: list[Tensor | None] = [None] * len(wanted)
    found: dict[Any, dict[str, SourceGrad]] = {}  # by origin and name
    # retain_graph: autograd frees this graph together with the tensors that ``FusedResult`` saved
    compute = functools.partial(torch.autograd.grad, retain_graph=True, allow_unused=True)
    with call.unsharded(*leaves[1:]):
        for each in losses:
            grads = compute(each.results, [*wanted, *each.boundaries], each.upstream)
            sums = list(map(_sum, sums, grads))
            for source, grad in zip(each.sources, grads[len(wanted) :], strict=True):
                origin, name = source.grad_fn.metadata[_ORIGIN]  # type: ignore[union-attr, index]
                found.setdefault(origin, {}).setdefault(name, SourceGrad(source)).add(grad)
        if found:
            next(iter(found)).merge(found)
        for results in found.values():
            pairs = [(x.source, x.grad) for x in results.values() if x.grad is not None]
            if pairs:
                outputs, upstream = zip(*pairs, strict=True)
                sums = list(map(_sum, sums, compute(outputs, wanted, upstream)))
    rounded = (y if y is None else y.to(x.dtype) for x, y in zip(wanted, sums, strict=True))
    return [next(rounded) if x is not None and x.requires_grad else None for x in leaves]


def _sum(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """Return ``x + y`` in float32 or more: a long sum in 16 bits would lose its small addends."""
    if x is None or y is None:
        return y if x is None else x
    if x.dtype == y.dtype and x.element_size() > 2:
        return x + y
    return x.to(accumulation_dtype(x.dtype)).add_(y)  # in place if ``x`` is already such a sum of 16-bit tensors


class TensorMeta(NamedTuple):
    """Lazy logits, their copies and a ``LazyGrad`` with respect to them share one object, see ``dense_if_foreign``."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def without_storage(cls: Any, meta: TensorMeta) -> Any:
    """Return a tensor of the class ``cls`` without storage."""
    made = Tensor._make_wrapper_subclass(cls, meta.shape, dtype=meta.dtype, device=meta.device)
    torch._C._set_throw_on_mutable_data_ptr(made)  # C++ code that asks for its address would get a null pointer
    return made


class LazyGrad(Tensor):
    """Gradient of lazy logits: a sum over losses, each with a function for its dense gradient, and of a dense tensor or None."""

    meta: TensorMeta
    losses: tuple[tuple[PendingLoss, Callable[[], Tensor]], ...]
    dense: Any  # a tensor or None
    call: Any

    @staticmethod
    def create(meta: TensorMeta, losses: Any, dense: Tensor | None, call: Any) -> LazyGrad:
        new = without_storage(LazyGrad, meta)
        new.meta, new.losses, new.dense, new.call = meta, losses, dense, call
        return new

    def materialize(self, why: str = "materialize") -> Tensor:
        if self.losses:
            self.call.note_materialized(f"{why} of their gradient")
            with torch.enable_grad():
                grads = [dense_grad().detach() for _, dense_grad in self.losses]
            self.dense = sum(grads[1:], grads[0]) if self.dense is None else sum(grads, self.dense)
            self.losses = ()
        return self.dense

    def plus(self, other: Tensor) -> LazyGrad:
        meta = other.meta if isinstance(other, LazyGrad) and not self.losses else self.meta
        with enable_reentrant_dispatch():  # autograd's engine calls this from C++
            losses, dense = _split(dense_if_foreign(other, meta))
        both = dense if self.dense is None else self.dense if dense is None else self.dense + dense
        return LazyGrad.create(meta, self.losses + losses, both, self.call)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyGrad(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = name_of(func)
        summed = name == "add" and not kwargs and all(isinstance(x, LazyGrad) for x in args)
        if summed or name == "clone" or _is_metadata_query(func) or func in _AUTOGRAD:
            return call_as_tensors(func, args, kwargs)
        args, kwargs = tree_map_only(LazyGrad, lambda x: x.materialize(name), (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Handle what autograd's engine calls: clone, detach, add. Other operations compute the dense gradient."""
        first = args[0]
        if isinstance(first, LazyGrad) and (func is _ATEN.clone.default or is_alias(func, args)):
            copied = first.dense is not None and func is _ATEN.clone.default
            dense = first.dense.clone() if copied else first.dense
            return LazyGrad.create(first.meta, first.losses, dense, first.call)
        # detect_anomaly: the gradients of the head are checked instead
        if func is _ATEN.isnan.default and first.losses:
            return torch.zeros((), dtype=torch.bool, device=first.device)
        alike = all(isinstance(x, Tensor) and x.shape == first.shape for x in args)
        lazy = isinstance(first, LazyGrad)
        if not kwargs and alike and (func is _ATEN.add.Tensor or (func is _ATEN.add_.Tensor and lazy)):
            both = first.plus(args[1]) if lazy else args[1].plus(first)
            if func is _ATEN.add.Tensor:
                return both
            first.meta, first.losses, first.dense = both.meta, both.losses, both.dense
            return first
        name = func._schema.name.partition("::")[2]
        # In a hook during torch.autograd.grad(loss, outputs.logits), which turns off ``__torch_function__``
        with enable_reentrant_dispatch():
            args, kwargs = tree_map_only(LazyGrad, lambda x: x.materialize(name), (args, kwargs or {}))
        return func(*args, **kwargs)


def dense_if_foreign(grad: Tensor, meta: TensorMeta) -> Tensor:
    """Return ``grad``, but dense if it was computed with respect to other logits than those with ``meta``.

    An autograd function whose backward is not the derivative of its forward, such as a straight-through estimator, or code that
    passes a gradient to ``backward`` leads to such gradients.
    """
    if isinstance(grad, LazyGrad) and grad.losses and grad.meta is not meta:
        return grad.materialize("use at other logits")
    return grad


def _split(grad: Tensor) -> tuple[Any, Tensor | None]:
    return (grad.losses, grad.dense) if isinstance(grad, LazyGrad) else ((), grad)


def _split_and_join(grad: Tensor) -> tuple[Any, Tensor | None]:
    """Let results of single tokens join a dense gradient, if there is one; the two may nearly cancel, as in z - logsumexp(z)."""
    losses, dense = _split(grad)
    if dense is None:
        return losses, None
    with torch.enable_grad():
        dense = sum((dense_grad().detach() for loss, dense_grad in losses if loss.is_per_token), dense)
    return tuple(each for each in losses if not each[0].is_per_token), dense


class HeadOutput(torch.autograd.Function):
    """The output of an LM head. Its backward returns the gradients of hidden states, weight and bias."""

    @staticmethod
    def forward(ctx: Any, cls: Any, recipe: Any, *operands: Tensor | None) -> Any:
        ctx.save_for_backward(*operands)
        ctx.cast, ctx.call = recipe.cast, recipe.call
        made = cls(recipe)
        ctx.meta = made.meta
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        operands, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        ctx.call.last_pass = ctx.call.gathered = None
        ctx.call.shared_passes.clear()
        losses, dense = _split_and_join(dense_if_foreign(grad, ctx.meta))
        grads: list[Tensor | None] = [None] * len(operands)
        if dense is not None:
            grads = _head_gradients(dense, operands, needed, ctx.cast)
        if losses:
            sums = map(_sum, grads, _leaf_gradients([each for each, _ in losses]))
            grads = [None if x is None else x.to(y.dtype) for x, y in zip(sums, operands, strict=True)]
        return None, None, *(x if need else None for x, need in zip(grads, needed, strict=True))


def _head_gradients(grad: Tensor, operands: Any, needed: Any, cast: torch.dtype | None) -> list[Tensor | None]:
    """Compute the gradients of hidden states, weight and bias from the dense gradient of the logits."""
    hidden_states, weight, bias = operands
    if is_dtensor(weight):
        wanted = [x for x, need in zip(operands, needed, strict=True) if need]
        with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
            logits = compute_logits(hidden_states, weight, bias, cast)
        made = iter(torch.autograd.grad(logits, wanted, grad, create_graph=torch.is_grad_enabled()))
        return [next(made) if need else None for need in needed]
    with torch.autocast(grad.device.type, enabled=False):
        grad_hidden = (grad @ weight.to(grad.dtype)).to(hidden_states.dtype) if needed[0] else None
        grad = grad.reshape(-1, grad.shape[-1])
        flat = hidden_states.reshape(-1, hidden_states.shape[-1]).to(grad.dtype)
        grad_weight = (grad.t() @ flat).to(weight.dtype) if needed[1] else None
    return [grad_hidden, grad_weight, grad.sum(0).to(bias.dtype) if needed[2] else None]


class RecordedOp(torch.autograd.Function):
    """Apply ``op`` to lazy logits, which gives other lazy logits, or the same ones if ``in_place``."""

    @staticmethod
    def forward(ctx: Any, source: Any, recipe: Any, op: Any, nonlinear: bool, in_place: bool = False) -> Any:
        ctx.source_meta, ctx.op, ctx.call, ctx.recipe = source.meta, op, recipe.call, None
        if nonlinear:
            # The source's values may be modified in place. Autograd frees the saved operands after the backward pass.
            ctx.recipe, ctx.storage = source.recipe.without_operands(), weakref.ref(source.shared_storage)
            ctx.save_for_backward(source, *source.recipe.operands)
        if in_place:
            ctx.mark_dirty(source)
            ctx.meta = source.meta = recipe.meta
            return source
        made = type(source)(recipe)
        if recipe.is_copy_of(source.recipe):
            made.meta = source.meta
        ctx.meta = made.meta
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        meta, create_graph = ctx.source_meta, torch.is_grad_enabled()
        recipe, op, grad = ctx.recipe, ctx.op, dense_if_foreign(grad, ctx.meta)
        storage: Any = None if recipe is None else ctx.storage()
        source, *operands = (None,) if recipe is None else ctx.saved_tensors
        if not create_graph:
            source = None  # it leads to logits whose gradient may keep ``vjp``: a reference cycle

        def vjp(grad: Tensor) -> Tensor:
            with torch.enable_grad():
                if recipe is None:  # linear: the same gradient at every point
                    x = torch.zeros((), dtype=meta.dtype, device=meta.device).expand(meta.shape).requires_grad_()
                elif create_graph:
                    if not isinstance(source, LazyTensor):  # modified in place, so autograd returns the real tensor
                        raise RuntimeError(MODIFIED)
                    x = source._materialize("a second derivative")
                else:
                    known = storage is not None and storage.values is not None and not storage.is_modified
                    values = storage.values if known else recipe.with_operands(*operands).build()
                    x = values.detach().requires_grad_()
                return torch.autograd.grad(op(x), x, grad, create_graph=create_graph)[0]

        losses, dense = _split_and_join(grad)
        grad_source = None if dense is None else vjp(dense)
        if isinstance(grad, LazyGrad):
            losses = tuple((each, lambda make=make: vjp(make())) for each, make in losses)
            grad_source = LazyGrad.create(meta, losses, grad_source, ctx.call)
        return grad_source, None, None, None, None


class FusedResult(torch.autograd.Function):
    """Results computed from hidden states and weight instead of logits. The backward returns the gradient of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Any, compute: Any, native: Any, by_token: bool) -> Any:
        recipe, call = logits.recipe, logits.recipe.call
        with torch.enable_grad():
            results = compute(recipe)
        boundaries, sources = zip(*call.boundaries, strict=True) if call.boundaries else ((), ())
        ctx.count, call.boundaries = (len(results), len(boundaries)), []
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in results if x is not None and not x.requires_grad))
        # Autograd frees saved tensors after the backward pass, and with them the graph behind the results
        ctx.save_for_backward(*results, *boundaries, *sources, *recipe.leaves, *recipe.operands)
        ctx.meta, ctx.recipe, ctx.native, ctx.by_token = logits.meta, recipe.without_operands(), native, by_token
        # Cloned, because Mixtral adds to its loss in place, which must not change the saved tensors
        return tuple(None if x is None else x.detach().clone() for x in results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the fused loss has no second derivative (create_graph=True); compute the loss from outputs.logits.materialize() "
                "or use the model without hf_cce (remove_cce)"
            )
        if all(grad is None for grad in grads):
            return None, None, None, None
        saved, native, (count, n) = ctx.saved_tensors, ctx.native, ctx.count
        results, boundaries, sources = saved[:count], saved[count : count + n], saved[count + n : -6]
        leaves, operands = saved[-6:-3], saved[-3:]
        used = [i for i, grad in enumerate(grads) if grad is not None]
        recipe, shape = ctx.recipe, ctx.meta.shape
        by_part = ctx.by_token and len(shape) > 1 and not recipe.class_first

        def dense_grad() -> Tensor:
            whole = recipe.with_operands(*operands).replace(leaves=leaves)
            whole.check_fresh()
            if not by_part:
                return gradient_of(whole, upstream)
            hidden, n = whole.hidden_states.flatten(0, -2), whole.hidden_states.dim() - 1
            parts = max(1, 4 * hidden.shape[0] * shape[-1] // DENSE_GRAD_BYTES)  # native(logits) are in float32
            chunks = zip(hidden.chunk(parts), *(each.flatten(0, n - 1).chunk(parts) for each in upstream), strict=True)
            made = [gradient_of(whole.with_operands(part, *operands[1:]), given) for part, *given in chunks]
            return torch.cat(made).view(shape)

        def gradient_of(part: Any, upstream: list[Tensor]) -> Tensor:
            logits = part.build().detach().requires_grad_()
            results = native(logits)
            grads = [grad.to(results[i].dtype) for i, grad in zip(used, upstream, strict=True)]
            return torch.autograd.grad([results[i] for i in used], logits, grads)[0]

        found, upstream = ([x[i] for i in used] for x in (results, grads))
        is_per_token = found[0].dim() >= len(shape) - 1
        loss = PendingLoss(found, upstream, boundaries, sources, leaves, recipe.call, is_per_token)
        return LazyGrad.create(ctx.meta, ((loss, dense_grad),), None, recipe.call), None, None, None


class WrittenLogits(torch.autograd.Function):
    """Lazy logits whose ``values`` were modified in place. Their gradient is that of the values, also for code in C++."""

    @staticmethod
    def forward(ctx: Any, logits: Any, values: Tensor) -> Any:
        ctx.mark_dirty(logits)
        return logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad


class Materialized(torch.autograd.Function):
    """Full logits whose gradient flows back through the lazy logits, which may have hooks."""

    @staticmethod
    def forward(ctx: Any, logits: Any, values: Tensor) -> Tensor:
        ctx.meta, ctx.call = logits.meta, logits.recipe.call
        ctx.masked_ids = [ids.to(values.device) for _, (ids, _) in logits.recipe.mask_ops()]
        ctx.vocabulary = 1 if logits.recipe.class_first else -1
        return values.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        for ids in ctx.masked_ids:  # these logits are constants
            grad = grad.index_fill(ctx.vocabulary, ids, 0.0)
        # A LazyGrad can be added to others; with create_graph=True the gradient has a graph of its own and is returned as it is
        lazy = grad if torch.is_grad_enabled() else LazyGrad.create(ctx.meta, (), grad, ctx.call)
        return lazy, None
