"""Lazy tensors: placeholders without storage for logits that have not been computed.

A lazy tensor has one of two types, which share one table of supported operations. In eager code it is a ``torch.Tensor`` subclass
with shape, dtype, device and a ``grad_fn``. It is a plain object, ``StandIn``, in compiled graphs, where Dynamo cannot create
wrapper subclasses, and between the layers of an LM head, which need none. Other operations use the real tensor, computed once.

In the backward pass, a fused loss returns a ``LazyGrad``, which refers to the losses whose gradient it is. Autograd passes it
through hooks and other autograd functions like any tensor, up to ``Root``, the ``grad_fn`` of the head's output, which runs the
fused backward. Reading a ``LazyGrad`` computes the dense gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map

from hf_cce.sharded import as_replicated, full_logits, is_dtensor

_COMMUTING = {"add", "mul", "multiply"}
# Properties that read the values of a tensor. All other properties, and the methods in _FACTS, need only metadata.
_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}
_FACTS = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex",
    "element_size", "__len__", "get_device", "is_inference", "storage_offset", "__hash__", "is_same_size", "is_neg",
    "is_conj", "register_hook", "retain_grad", "requires_grad_", "register_post_accumulate_grad_hook", "_is_view",
}  # fmt: skip
_AUTOGRAD = (torch.autograd.grad, torch.autograd.backward)  # these follow the graph and read no values
_ATEN = torch.ops.aten
_ALIASES = {_ATEN.detach.default, _ATEN.alias.default, _ATEN.view_as.default}


class LazyTensor:
    """Placeholder for a floating-point tensor."""

    # By name of a torch function; NotImplemented falls back to the real tensor
    ANSWERS: ClassVar[dict[str, Callable[..., Any]]] = {}
    _written = False  # the real tensor was modified in place, so what was recorded is stale

    def _real(self, why: str) -> Tensor:
        """Return the real tensor; ``why`` names the operation that needs it."""
        raise NotImplementedError

    def _ask(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        answer = self.ANSWERS.get(name)
        if answer is None or self._written or "out" in kwargs:
            return NotImplemented
        return answer(self, *args, **kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "input" in kwargs and len(args) == 0:
            args, kwargs = (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}
        name = _name_of(func)
        if name == "matmul" and torch.compiler.is_compiling():
            args = _as_written(args)
        first = args[0] if len(args) > 0 else None
        facts = isinstance(first, LazyTensor) and isinstance(first, Tensor) and not first._written
        if (facts and _asks_for_facts(func)) or func in _AUTOGRAD:
            return as_tensors(func, args, kwargs)
        result = NotImplemented
        if isinstance(first, LazyTensor):
            result = first._ask(name, args[1:], kwargs)
        elif len(args) == 2 and isinstance(args[1], LazyTensor) and name in _COMMUTING:
            result = args[1]._ask(name, (first,), kwargs)
        return func(*plain(args, name), **plain(kwargs, name)) if result is NotImplemented else result


def _as_written(args: Any) -> Any:
    """Undo Dynamo's swap of ``x @ matrix``, which it calls as ``matrix.matmul(x)`` if ``x`` is not a ``torch.Tensor``."""
    if len(args) != 2 or isinstance(args[0], LazyTensor) or args[0].dim() != 2 or not isinstance(args[1], StandIn):
        return args
    matrix, x = args
    swapped = x.shape[-1] == matrix.shape[0] and (x.ndim > 2 or x.shape[0] != matrix.shape[1])
    return (x, matrix) if swapped else args


def as_tensors(func: Any, args: Any, kwargs: Any = None) -> Any:
    """Call ``func`` as on plain tensors, without the ``__torch_function__`` of its arguments."""
    return Tensor.__torch_function__(func, (), args, kwargs)


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", "an operation")
    return func.__self__.__name__ if name == "__get__" else name


def _asks_for_facts(func: Any) -> bool:
    """Return True if ``func`` reads only metadata of its first argument, or is an OpOverload, as a TorchDispatchMode calls it."""
    if getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__"):
        return func.__self__.__name__ not in _VALUES
    return getattr(func, "__name__", "") in _FACTS or isinstance(func, torch._ops.OpOverload)


def plain(value: Any, why: str = "an operation") -> Any:
    """Return ``value`` with every lazy tensor replaced by its real tensor, also inside lists, tuples and dictionaries."""
    if isinstance(value, LazyTensor):
        return value._real(why)
    if type(value) in (list, tuple):
        return type(value)([plain(each, why) for each in value])
    if type(value) is dict:
        return {key: plain(each, why) for key, each in value.items()}
    return value


class StandIn(LazyTensor):
    """Plain object with the interface of a tensor. Subclasses define ``_real``, ``shape``, ``dtype`` and ``device``."""

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

    def _do(self, name: str, *args: Any, **kwargs: Any) -> Any:
        result = self._ask(name, args, kwargs)
        if result is NotImplemented:
            result = getattr(self._real(name), name)(*plain(args, name), **plain(kwargs, name))
        return result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return functools.partial(self._do, name) if callable(getattr(Tensor, name)) else getattr(self._real(name), name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._real("iteration"))

    def __hash__(self) -> int:
        return id(self)


def _special(name: str) -> Callable[..., Any]:
    """Return a special method. Python looks these up on the class, never in ``__getattr__``."""
    return lambda self, *args: self._do(name, *args)


# fmt: off
_SPECIALS = (
    "abs", "add", "and", "array", "bool", "contains", "deepcopy", "eq", "float", "floordiv", "ge", "getitem", "gt", "iadd",
    "iand", "ifloordiv", "imod", "imul", "index", "int", "invert", "ior", "ipow", "isub", "itruediv", "ixor", "le", "lt",
    "matmul", "mod", "mul", "ne", "neg", "or", "pos", "pow", "radd", "reduce_ex", "rfloordiv", "rmatmul", "rmul", "rpow",
    "rsub", "rtruediv", "setitem", "sub", "truediv", "xor",
)
# fmt: on
for _word in _SPECIALS:
    setattr(StandIn, f"__{_word}__", _special(f"__{_word}__"))


def kept_by_us() -> Any:
    """Return a context that saves tensors without calling outer hooks (a checkpoint counts calls) and rejects modified ones."""
    return saved_tensors_hooks(lambda x: (x, version_of(x)), _unchanged)


def _unchanged(saved: tuple[Tensor, int | None]) -> Tensor:
    if saved[1] != version_of(saved[0]):
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: the hidden states "
            "or the weight of the LM head"
        )
    return saved[0]


def version_of(x: Tensor | None) -> int | None:
    return None if x is None or x.is_inference() else x._version


def is_alias(func: Any, args: Any) -> bool:
    """Return True if the operator ``func`` returns its first argument unchanged, on the same memory."""
    return func in _ALIASES or (func is _ATEN.view.default and list(args[1]) == list(args[0].shape))


def multiply(hidden_states: Tensor, weight: Tensor, bias: Tensor | None, cast: torch.dtype | None) -> Tensor:
    """Compute the logits [..., V], in the autocast dtype ``cast`` if there is one."""
    if cast is not None:
        hidden_states, weight, bias = hidden_states.to(cast), weight.to(cast), None if bias is None else bias.to(cast)
    with torch.autocast(hidden_states.device.type, enabled=False):
        return full_logits(F.linear(as_replicated(hidden_states, weight), weight, bias))


class Losses:
    """Results of the fused loss with their upstream gradients. The gradients of ``leaves`` are computed once."""

    def __init__(self, results: Any, upstream: Any, leaves: tuple[Tensor | None, ...], call: Any) -> None:
        self.results, self.upstream, self.leaves, self.call = results, upstream, leaves, call
        self.found: list[Tensor | None] | None = None

    def gradients(self) -> list[Tensor | None]:
        if self.found is None:
            wanted = [x for x in self.leaves if x is not None and x.requires_grad]
            # retain_graph: autograd frees this graph together with the tensors that ``Answer`` saved
            with self.call.weight_at_hand(self.leaves[1]):
                made = torch.autograd.grad(self.results, wanted, self.upstream, retain_graph=True, allow_unused=True)
            found = iter(made)
            self.found = [next(found) if x is not None and x.requires_grad else None for x in self.leaves]
        return self.found


def _in_one_pass(losses: list[Losses]) -> list[Losses]:
    """Merge those of ``losses`` that have no gradients yet, so that one backward pass computes what they share."""
    fresh = [each for each in losses if each.found is None]
    if len(fresh) < 2:
        return losses
    results, upstream = ([x for each in fresh for x in getattr(each, name)] for name in ("results", "upstream"))
    done = [each for each in losses if each.found is not None]
    return [*done, Losses(results, upstream, fresh[0].leaves[:3], fresh[0].call)]


class Like(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class LazyGrad(Tensor):
    """Gradient of lazy logits: losses, each with a function that computes its dense gradient, plus a dense part or None."""

    like: Like
    losses: tuple[tuple[Losses, Callable[[], Tensor]], ...]
    more: Tensor | None
    call: Any

    @staticmethod
    def of(like: Like, losses: Any, more: Tensor | None, call: Any) -> LazyGrad:
        new = Tensor._make_wrapper_subclass(LazyGrad, like.shape, dtype=like.dtype, device=like.device)
        new.like, new.losses, new.more, new.call = like, losses, more, call
        return new

    def read(self, why: str) -> Tensor:
        if self.losses:
            self.call.note_materialized(f"{why} of their gradient")
            with torch.enable_grad():
                made = [make().detach() for _, make in self.losses]
            self.more = sum(made[1:], made[0]) if self.more is None else sum(made, self.more)
            self.losses = ()
        assert self.more is not None
        return self.more

    def plus(self, other: Tensor) -> LazyGrad:
        losses, more = (other.losses, other.more) if isinstance(other, LazyGrad) else ((), other)
        both = more if self.more is None else self.more if more is None else self.more + more
        return LazyGrad.of(self.like, self.losses + losses, both, self.call)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyGrad(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _name_of(func)
        summed = name == "add" and not kwargs and all(isinstance(x, LazyGrad) for x in args)
        if summed or name == "clone" or _asks_for_facts(func) or func in _AUTOGRAD:
            return as_tensors(func, args, kwargs)
        real = lambda x: x.read(name) if isinstance(x, LazyGrad) else x  # noqa: E731
        return func(*tree_map(real, args), **tree_map(real, kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Handle what autograd's engine calls: clone, detach, add. Below autograd, the dense gradient cannot be computed."""
        first = args[0]
        if isinstance(first, LazyGrad) and (func is _ATEN.clone.default or is_alias(func, args)):
            copied = first.more is not None and func is _ATEN.clone.default
            more = first.more.clone() if copied else first.more  # type: ignore[union-attr]
            return LazyGrad.of(first.like, first.losses, more, first.call)
        alike = all(isinstance(x, Tensor) and x.shape == first.shape for x in args)
        if func is _ATEN.add.Tensor and not kwargs and alike:
            return first.plus(args[1]) if isinstance(first, LazyGrad) else args[1].plus(first)
        if all(not isinstance(x, LazyGrad) or not x.losses for x in args):
            return func(*(x.more if isinstance(x, LazyGrad) else x for x in args), **(kwargs or {}))
        raise NotImplementedError(
            f"{func} of the gradient of deferred logits; in a hook compute with it in Python, or use the model without CCE "
            "(remove_cce)"
        )


class Root(torch.autograd.Function):
    """The output of an LM head. Its backward returns the gradients of hidden states, weight and bias."""

    @staticmethod
    def forward(ctx: Any, cls: Any, recipe: Any, *parts: Tensor | None) -> Any:
        ctx.save_for_backward(*parts)
        ctx.cast, ctx.call = recipe.cast, recipe.call
        return cls(recipe)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        parts, needed, ctx.call.last_pass = ctx.saved_tensors, ctx.needs_input_grad[2:], None
        losses, real = (grad.losses, grad.more) if isinstance(grad, LazyGrad) else ((), grad)
        found: list[Tensor | None] = [None] * len(parts)
        if real is not None:
            found = _head_gradients(real, parts, needed, ctx.cast)
        for each in _in_one_pass([each for each, _ in losses]):
            pairs = zip(found, each.gradients(), strict=False)  # ``Step`` returns the gradient of an added bias
            found = [y if x is None else x if y is None else x + y for x, y in pairs]
            each.found = None  # without other references, autograd reuses the memory instead of copying it
        return None, None, *(x if need else None for x, need in zip(found, needed, strict=True))


def _head_gradients(grad: Tensor, parts: Any, needed: Any, cast: torch.dtype | None) -> list[Tensor | None]:
    """Compute the gradients of hidden states, weight and bias from the dense gradient of the logits."""
    hidden_states, weight, bias = parts
    if is_dtensor(weight):
        wanted = [x for x, need in zip(parts, needed, strict=True) if need]
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            logits = multiply(hidden_states, weight, bias, cast)
            made = iter(torch.autograd.grad(logits, wanted, grad, create_graph=again))
        return [next(made) if need else None for need in needed]
    with torch.autocast(grad.device.type, enabled=False):
        of_hidden = (grad @ weight.to(grad.dtype)).to(hidden_states.dtype) if needed[0] else None
        grad = grad.reshape(-1, grad.shape[-1])
        flat = hidden_states.reshape(-1, hidden_states.shape[-1]).to(grad.dtype)
        of_weight = (grad.t() @ flat).to(weight.dtype) if needed[1] else None
    return [of_hidden, of_weight, grad.sum(0).to(bias.dtype) if needed[2] else None]


class Step(torch.autograd.Function):
    """Apply ``op`` to lazy logits, which gives other lazy logits. ``other`` [V], if given, is a bias added to them."""

    @staticmethod
    def forward(ctx: Any, source: Any, recipe: Any, op: Any, nonlinear: bool, other: Tensor | None) -> Any:
        ctx.like, ctx.op, ctx.call, ctx.leaf = source.recipe.like, op, recipe.call, len(source.recipe.leaves)
        ctx.save_for_backward(source if nonlinear else None, other)
        return type(source)(recipe)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (source, other), like, again = ctx.saved_tensors, ctx.like, torch.is_grad_enabled()

        def back(grad: Tensor) -> Tensor:
            with torch.enable_grad():
                if source is None:  # linear: the same gradient at every point
                    x = torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape).requires_grad_()
                elif again:
                    x = source._real("a second derivative")
                else:
                    known = source.memory.values is not None and not source._written
                    x = (source.memory.values if known else source.recipe.build()).detach().requires_grad_()
                return torch.autograd.grad(ctx.op(x), x, grad, create_graph=again)[0]

        losses, real = (grad.losses, grad.more) if isinstance(grad, LazyGrad) else ((), grad)
        of_other = None
        if ctx.needs_input_grad[4]:
            parts = [] if real is None else [real.reshape(-1, real.shape[-1]).sum(0)]
            parts += [each.gradients()[ctx.leaf] for each, _ in losses]
            of_other = sum(parts[1:], parts[0]).view(other.shape).to(other.dtype)
        below = None if real is None else back(real)
        if isinstance(grad, LazyGrad):
            losses = tuple((each, functools.partial(lambda make: back(make()), make)) for each, make in losses)
            below = LazyGrad.of(like, losses, below, ctx.call)
        return below, None, None, None, of_other


class Answer(torch.autograd.Function):
    """Results computed from hidden states and weight instead of logits. The backward returns the gradient of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Any, compute: Any, native: Any) -> Any:
        recipe = logits.recipe
        with torch.enable_grad():
            results = compute(recipe)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in results if x is not None and not x.requires_grad))
        # Autograd frees saved tensors after the backward pass, and with them the graph behind the results
        ctx.count = len(results), len(recipe.leaves)
        ctx.save_for_backward(*results, *recipe.leaves, *recipe.parts)
        ctx.like, ctx.recipe, ctx.native = recipe.like, recipe.without_parts(), native
        # Cloned, because Mixtral adds to its loss in place, which must not change the saved tensors
        return tuple(None if x is None else x.detach().clone() for x in results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the fused loss has no second derivative (create_graph=True); compute the loss from outputs.logits.materialize() "
                "or use the model without CCE (remove_cce)"
            )
        if all(grad is None for grad in grads):
            return None, None, None
        saved, (count, leaves), native = ctx.saved_tensors, ctx.count, ctx.native
        results, leaves, parts = saved[:count], saved[count : count + leaves], saved[count + leaves :]
        used = [i for i, grad in enumerate(grads) if grad is not None]
        recipe = ctx.recipe

        def make() -> Tensor:
            logits = recipe.with_parts(*parts).build().detach().requires_grad_()
            made = native(logits)
            return torch.autograd.grad([made[i] for i in used], logits, [grads[i].to(made[i].dtype) for i in used])[0]

        losses = Losses([results[i] for i in used], [grads[i] for i in used], leaves, recipe.call)
        return LazyGrad.of(ctx.like, ((losses, make),), None, recipe.call), None, None


class Materialize(torch.autograd.Function):
    """Full logits whose gradient flows back through the lazy logits, which may have hooks."""

    @staticmethod
    def forward(ctx: Any, logits: Any, values: Tensor) -> Tensor:
        ctx.like, ctx.call = logits.recipe.like, logits.recipe.call
        ctx.forbidden = [ids.to(values.device) for _, (ids, _) in logits.recipe.forbidden()]
        return values.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        for ids in ctx.forbidden:  # these logits are constants
            grad = grad.index_fill(-1, ids, 0.0)
        # A LazyGrad can be added to others; with create_graph=True the gradient has a graph of its own and is returned as it is
        lazy = grad if torch.is_grad_enabled() else LazyGrad.of(ctx.like, (), grad, ctx.call)
        return lazy, None
