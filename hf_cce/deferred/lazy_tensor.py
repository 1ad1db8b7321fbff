"""Tensors without storage: how logits that nobody has multiplied out pass for the tensor that they stand for.

A lazy tensor comes in one of two shells, with one table of answers. ``Wrapper``, in eager code, is a ``torch.Tensor`` with
shape, dtype, device and a ``grad_fn``; ``StandIn`` is a plain object: Dynamo makes no wrapper subclass inside a graph, and the
layers inside an LM head need none. What the table has no answer for gets real logits, made once.

Backward, a loss hands on a ``LazyGrad``, which knows of which losses it is the gradient. Autograd carries it through hooks and
through other people's functions like any tensor, and ``Root``, the ``grad_fn`` of the head's output, runs the fused backward.
Reading a ``LazyGrad`` gives the real gradient.
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

from hf_cce.deferred.operations import apply_ops
from hf_cce.sharded import gathered, is_dtensor, replicated

_COMMUTING = {"add", "mul", "multiply"}
# Properties of a tensor that depend on its values; a wrapper knows the others by itself, and these methods.
_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}
_FACTS = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex",
    "element_size", "__len__", "get_device", "is_inference", "storage_offset", "__hash__", "is_same_size", "is_neg",
    "is_conj", "register_hook", "retain_grad", "requires_grad_", "register_post_accumulate_grad_hook", "_is_view",
}  # fmt: skip
_AUTOGRAD = (torch.autograd.grad, torch.autograd.backward)  # go by the graph
_ATEN = torch.ops.aten
_ALIASES = {_ATEN.detach.default, _ATEN.alias.default, _ATEN.clone.default, _ATEN.view_as.default}


class LazyTensor:
    """Stands for a floating-point tensor."""

    # By the name of a torch function; NotImplemented asks for values
    ANSWERS: ClassVar[dict[str, Callable[..., Any]]] = {}
    _written = False  # the real tensor was written to, so what was recorded is no longer true
    base: Any = None  # of a distribution: the logits that it is the softmax of

    def _real(self, why: str) -> Tensor:
        """The tensor itself; ``why`` names the operation that asks for it."""
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
        name, first = getattr(func, "__name__", "an operation"), args[0] if len(args) > 0 else None
        facts = isinstance(first, Wrapper) and _asks_for_facts(func) and not first._written
        if facts or func in _AUTOGRAD:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name == "__get__":
            name = func.__self__.__name__
        result = NotImplemented
        if isinstance(first, LazyTensor):
            result = first._ask(name, args[1:], kwargs)
        elif len(args) == 2 and isinstance(args[1], LazyTensor) and name in _COMMUTING:
            result = args[1]._ask(name, (first,), kwargs)
        return func(*plain(args, name), **plain(kwargs, name)) if result is NotImplemented else result


def _asks_for_facts(func: Any) -> bool:
    """Whether ``func`` reads no values of its first argument, or is the call of a TorchDispatchMode."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return func.__self__.__name__ not in _VALUES
    return name in _FACTS or isinstance(func, torch._ops.OpOverload)


def plain(value: Any, why: str = "an operation") -> Any:
    """``value`` with the real tensor in place of every lazy one; looks into lists, tuples and dictionaries."""
    if isinstance(value, LazyTensor):
        return value._real(why)
    if type(value) in (list, tuple):
        return type(value)([plain(each, why) for each in value])
    if type(value) is dict:
        return {key: plain(each, why) for key, each in value.items()}
    return value


class StandIn(LazyTensor):
    """A plain object that does what a tensor does. Subclasses give ``_real``, ``shape``, ``dtype`` and ``device``."""

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
        if not callable(getattr(Tensor, name)):
            return getattr(self._real(name), name)
        return functools.partial(self._do, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._real("iteration"))

    def __hash__(self) -> int:
        return id(self)


def _special(name: str) -> Callable[..., Any]:
    """A special method, which Python looks up on the class and never in ``__getattr__``."""

    def method(self: StandIn, *args: Any) -> Any:
        return self._do(name, *args)

    method.__name__ = name
    return method


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


class Wrapper(LazyTensor, Tensor):
    """A ``torch.Tensor`` without storage. ``recipe`` knows how to make its values, and whose logits they are."""

    recipe: Any
    _logits: Tensor | None  # the real logits, without a gradient, once somebody asked for them
    _made: Tensor | None  # the same memory, with a gradient that goes back through this wrapper
    _version_made: int

    @classmethod
    def of(cls, recipe: Any, *parts: Tensor | None) -> Any:
        """The wrapper whose gradient goes to ``parts``: hidden states, weight, bias."""
        with _kept_by_us():
            return Root.apply(cls, recipe, *parts)

    @classmethod
    def _bare(cls, recipe: Any) -> Any:
        made = Tensor._make_wrapper_subclass(cls, recipe.shape, dtype=recipe.dtype, device=recipe.device)
        made.recipe, made._logits, made._made, made._version_made = recipe, None, None, 0
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        state = "not made" if self._logits is None else "made"
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}', {state})"

    @property
    def _written(self) -> bool:  # type: ignore[override]
        return self._logits is not None and self._logits._version != self._version_made

    def _alias(self) -> Any:
        """The same memory as another tensor, without a gradient."""
        new = self._bare(self.recipe)
        new._logits, new._version_made, new.base = self._logits, self._version_made, self.base
        return new

    def _derive(self, op: Any, change: Any, nonlinear: bool = False, other: Tensor | None = None) -> Any:
        """``op`` of these logits, recorded by ``change`` of the recipe."""
        self._check()
        with _kept_by_us(), torch.enable_grad():
            recipe = change(self.recipe)
        with _kept_by_us():
            return Step.apply(self, recipe, op, nonlinear, other)

    def _answer(self, compute: Callable[[Any], tuple[Any, ...]], native: Callable[[Tensor], tuple[Any, ...]]) -> Any:
        """``compute(recipe)``, which is what ``native`` computes from real logits; differentiable like that."""
        self._check()
        with self.recipe.call.weight_at_hand(self.recipe.weight):
            if not (self.requires_grad and torch.is_grad_enabled()):
                with torch.no_grad():
                    return compute(self.recipe)
            if not any(x is not None and x.requires_grad for x in self.recipe.leaves):  # only the logits' own is wanted
                return native(self._real("their gradient"))
            with _kept_by_us():
                return Answer.apply(self, compute, native)

    def _read(self, why: str) -> Tensor:
        """The values, without a gradient."""
        if self._written:
            assert self._logits is not None
            return self._logits
        self._check()
        if self._logits is None:
            with torch.inference_mode(False), torch.no_grad():
                if self.base is None or self.base._written:
                    self.recipe.call.note_materialized(why)
                    made = self.recipe.build()
                    # torch refuses writes into a view that was made without gradients, as a product with a bias is
                    self._logits = made.data if made._is_view() else made
                else:
                    self._logits = apply_ops(self.recipe.ops[len(self.base.recipe.ops) :], self.base._read(why))
            self._version_made = self._logits._version
            self.recipe.family.append((self._logits, self._version_made))
        return self._logits

    def _real(self, why: str) -> Tensor:
        values = self._read(why)
        with torch._C.DisableTorchFunctionSubclass():  # asked of what was written to, it would ask for the real tensor
            differentiable = self.requires_grad
        if self._made is None and differentiable:
            # Wherever they are asked for, they are what the head would have made during the call: with a gradient
            with torch.inference_mode(False), torch.enable_grad():
                self._made = Materialize.apply(self, values)
                for name, value in self.recipe.ops:  # once more, for autograd
                    if name == "forbid" and not self._written:
                        self._made[..., value[0].to(values.device)] = value[1]
                        self._set_version(values._version)
        return values if self._made is None else self._made

    def _set_version(self, version: int) -> None:
        self.recipe.family[:] = [(x, version if x is self._logits else known) for x, known in self.recipe.family]
        self._version_made = version

    def _expose(self) -> Tensor:
        """``Tensor.data``: writes into it leave no trace, so from now on the real logits are the truth."""
        made = self._real("data")
        self._set_version(-1)
        return made.data

    def _check(self) -> None:
        """Refuse to answer from a recipe that is no longer true."""
        if any(values is not self._logits and values._version != version for values, version in self.recipe.family):
            raise RuntimeError(
                "these deferred logits are a view of logits that were written to since, or have one; write before viewing, or "
                "use the model without CCE (remove_cce)"
            )
        self.recipe.check_fresh()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Where C++ asks past ``__torch_function__``: below autograd, which has recorded by now what was asked."""
        first = args[0] if args else None
        same_view = func is _ATEN.view.default and isinstance(first, Wrapper) and list(args[1]) == list(first.shape)
        if (func in _ALIASES or same_view) and isinstance(first, Wrapper) and not first._written:
            return first._alias()
        name = func._schema.name.partition("::")[2]
        written = func._schema.arguments and func._schema.arguments[0].alias_info
        if isinstance(first, Wrapper) and written is not None and written.is_write:
            raise NotImplementedError(f"{name} on deferred logits, from C++; use outputs.logits.materialize()")
        real = lambda x: x._read(name) if isinstance(x, Wrapper) else x  # noqa: E731
        return func(*tree_map(real, args), **tree_map(real, kwargs or {}))


def _kept_by_us() -> Any:
    """Saved tensors that other people's hooks (a checkpoint's, which counts them) do not see; changed ones are an error."""
    return saved_tensors_hooks(lambda x: (x, None if x.is_inference() else x._version), _unchanged)


def _unchanged(saved: tuple[Tensor, int | None]) -> Tensor:
    if saved[1] is not None and saved[0]._version != saved[1]:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: the hidden states "
            "or the weight of the LM head"
        )
    return saved[0]


def multiply(hidden_states: Tensor, weight: Tensor, bias: Tensor | None, cast: torch.dtype | None) -> Tensor:
    """The logits [..., V], multiplied in ``cast``, the dtype of an autocast, or as they are."""
    if cast is not None:
        hidden_states, weight, bias = hidden_states.to(cast), weight.to(cast), None if bias is None else bias.to(cast)
    with torch.autocast(hidden_states.device.type, enabled=False):
        return gathered(F.linear(replicated(hidden_states, weight), weight, bias))


class Losses:
    """Results of the fused loss with their upstream gradients; their gradients, computed once, with respect to ``leaves``."""

    def __init__(self, results: Any, upstream: Any, leaves: tuple[Tensor | None, ...], call: Any) -> None:
        self.results, self.upstream, self.leaves, self.call = results, upstream, leaves, call
        self.found: list[Tensor | None] | None = None

    def gradients(self) -> list[Tensor | None]:
        if self.found is None:
            wanted = [x for x in self.leaves if x is not None and x.requires_grad]
            # The graph is kept here and freed by autograd, with what ``Answer`` has saved
            with self.call.weight_at_hand(self.leaves[1]):
                made = torch.autograd.grad(self.results, wanted, self.upstream, retain_graph=True, allow_unused=True)
            found = iter(made)
            self.found = [next(found) if x is not None and x.requires_grad else None for x in self.leaves]
        return self.found


class Like(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class LazyGrad(Tensor):
    """The gradient of lazy logits: that of some losses, each with what makes it real, and perhaps a real one besides."""

    like: Any
    losses: tuple[tuple[Losses, Callable[[], Tensor]], ...]
    more: Tensor | None
    call: Any

    @staticmethod
    def of(like: Any, losses: Any, more: Tensor | None, call: Any) -> LazyGrad:
        new = Tensor._make_wrapper_subclass(LazyGrad, like.shape, dtype=like.dtype, device=like.device)
        new.like, new.losses, new.more, new.call = Like(like.shape, like.dtype, like.device), losses, more, call
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
        if _asks_for_facts(func) or func in _AUTOGRAD or getattr(func, "__name__", "") == "clone":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "an operation")
        if name == "add" and not kwargs and len(args) == 2 and all(isinstance(x, LazyGrad) for x in args):
            return args[0].plus(args[1])
        real = lambda x: x.read(name) if isinstance(x, LazyGrad) else x  # noqa: E731
        return func(*tree_map(real, args), **tree_map(real, kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What autograd's engine does with a gradient. The real one cannot be made here, below autograd."""
        first: Any = args[0] if args else None
        if isinstance(first, LazyGrad):
            same_view = func is _ATEN.view.default and list(args[1]) == list(first.shape)
            if func in _ALIASES or same_view:
                more = first.more
                if more is not None and func is _ATEN.clone.default:
                    more = more.clone()
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
    """The output of an LM head: its gradient is that of hidden states, weight and bias."""

    @staticmethod
    def forward(ctx: Any, cls: Any, recipe: Any, *parts: Tensor | None) -> Any:
        ctx.save_for_backward(*parts)
        ctx.cast = recipe.cast
        return cls._bare(recipe)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        parts, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        losses, real = (grad.losses, grad.more) if isinstance(grad, LazyGrad) else ((), grad)
        found: list[Tensor | None] = [None] * len(parts)
        if real is not None:
            found = _head_gradients(real, parts, needed, ctx.cast)
        for each, _ in losses:
            pairs = zip(found, each.gradients(), strict=False)  # a bias that was added has its gradient in ``Step``
            found = [y if x is None else x if y is None else x + y for x, y in pairs]
            each.found = None  # one loss's at a time; autograd takes over memory that nobody else holds
        return None, None, *(x if need else None for x, need in zip(found, needed, strict=True))


def _head_gradients(grad: Tensor, parts: Any, needed: Any, cast: torch.dtype | None) -> list[Tensor | None]:
    """Of hidden states, weight and bias, from the real gradient of the logits."""
    hidden_states, weight, bias = parts
    if is_dtensor(weight):
        wanted = [x for x, need in zip(parts, needed, strict=True) if need]
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            made = iter(
                torch.autograd.grad(multiply(hidden_states, weight, bias, cast), wanted, grad, create_graph=again)
            )
        return [next(made) if need else None for need in needed]
    grad = grad.reshape(-1, grad.shape[-1])
    with torch.autocast(grad.device.type, enabled=False):
        of_hidden = (
            (grad @ weight.to(grad.dtype)).view(hidden_states.shape).to(hidden_states.dtype) if needed[0] else None
        )
        flat = hidden_states.reshape(-1, hidden_states.shape[-1]).to(grad.dtype)
        of_weight = (grad.t() @ flat).to(weight.dtype) if needed[1] else None
    return [of_hidden, of_weight, grad.sum(0).to(bias.dtype) if needed[2] else None]


class Step(torch.autograd.Function):
    """``op`` of lazy logits, as other lazy logits; ``other``, if any, is added to them: one number per vocabulary entry."""

    @staticmethod
    def forward(ctx: Any, source: Any, recipe: Any, op: Any, nonlinear: bool, other: Tensor | None) -> Any:
        of = source.recipe
        ctx.like, ctx.op, ctx.call, ctx.leaf = Like(of.shape, of.dtype, of.device), op, of.call, len(of.leaves)
        ctx.save_for_backward(source if nonlinear else None, other)
        return source._bare(recipe)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (source, other), like, op, again = ctx.saved_tensors, ctx.like, ctx.op, torch.is_grad_enabled()

        def back(grad: Tensor) -> Tensor:
            with torch.enable_grad():
                if source is None:  # linear: at any point
                    x = torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape).requires_grad_()
                else:
                    known = source._logits is not None and not source._written
                    if again:
                        x = source._real("a second derivative")
                    else:
                        x = (source._logits if known else source.recipe.build()).detach().requires_grad_()
                return torch.autograd.grad(op(x), x, grad, create_graph=again)[0]

        of_other = None
        if other is not None and ctx.needs_input_grad[4]:
            real = grad.more if isinstance(grad, LazyGrad) else grad
            parts = [] if real is None else [real.reshape(-1, real.shape[-1]).sum(0)]
            parts += [each.gradients()[ctx.leaf] for each, _ in grad.losses] if isinstance(grad, LazyGrad) else []
            of_other = sum(parts[1:], parts[0]).view(other.shape).to(other.dtype)
        if isinstance(grad, LazyGrad):
            losses = tuple((each, functools.partial(lambda make: back(make()), make)) for each, make in grad.losses)
            more = None if grad.more is None else back(grad.more)
            return LazyGrad.of(like, losses, more, ctx.call), None, None, None, of_other
        return back(grad), None, None, None, of_other


class Answer(torch.autograd.Function):
    """Results that were computed from the ingredients of lazy logits: their gradient is that of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Any, compute: Any, native: Any) -> Any:
        recipe = logits.recipe
        with torch.enable_grad():
            results = compute(recipe)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in results if x is not None and not x.requires_grad))
        # Autograd frees what it has saved after the backward pass, and with it the graph behind the results
        ctx.count = len(results), len(recipe.leaves)
        ctx.save_for_backward(*results, *recipe.leaves, *recipe.parts)
        ctx.like, ctx.recipe, ctx.native = recipe.like, recipe.without_parts(), native
        # Mixtral adds to its loss in place, and what is saved must stay
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
    """Real logits, whose gradient goes back through the lazy ones: there may be hooks on its way."""

    @staticmethod
    def forward(ctx: Any, logits: Any, values: Tensor) -> Tensor:
        ctx.like, ctx.call = logits.recipe.like, logits.recipe.call
        return values.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        # As a lazy gradient it adds up with others; with create_graph=True as it is, for it has a graph of its own
        lazy = grad if torch.is_grad_enabled() else LazyGrad.of(ctx.like, (), grad, ctx.call)
        return lazy, None
