"""What a plain object needs so that torch code takes it for the tensor it stands for.

A subclass says how to get the real tensor and answers what it can answer without; everything else comes here, gets
the real tensor and goes on with that. A plain object with ``__torch_function__`` and no tensor subclass, because Dynamo
traces the former and stops at the latter.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

# None where torch has it in C++
_APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)

# Done to logits: ("mul" | "div", number), ("tanh", None), ("to", dtype | device), ("forbid", (words, number))
Op = tuple[str, Any]


class Symbolic:
    """Stands for a floating-point tensor. Subclasses give ``_real``, ``shape``, ``dtype`` and ``device``.

    And in ``_ANSWERS`` torch functions with the methods for them; in ``_COMMUTES`` those that may come as ``tensor * self``.
    """

    _ANSWERS: ClassVar[dict[Any, str]] = {}
    _COMMUTES: ClassVar[dict[Any, str]] = {}
    layout = torch.strided
    is_leaf = is_sparse = is_nested = is_quantized = False

    @property
    def shape(self) -> torch.Size:
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        raise NotImplementedError

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
        return math.prod(self.shape)

    def is_floating_point(self) -> bool:
        return True

    def is_contiguous(self, *_: Any, **__: Any) -> bool:
        return True

    def __len__(self) -> int:
        return self.shape[0]

    def _real(self, why: str) -> Tensor:
        """The tensor itself; ``why`` names the operation that asks for it."""
        raise NotImplementedError

    def _write(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the in-place method ``name`` of the tensor."""
        return getattr(self._real(name), name)(*plain(args), **plain(kwargs))

    def _read(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the method ``name`` of the tensor."""
        return getattr(self._real(name), name)(*plain(args), **plain(kwargs))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if len(args) > 0 and isinstance(args[0], Symbolic):
            answer = args[0]._ANSWERS.get(func)
            if answer is not None and "out" not in kwargs:
                return getattr(args[0], answer)(*args[1:], **kwargs)
        elif len(args) == 2 and isinstance(args[1], Symbolic) and not kwargs and func in args[1]._COMMUTES:
            return getattr(args[1], args[1]._COMMUTES[func])(args[0])
        elif isinstance(kwargs.get("input"), Symbolic):
            return func(kwargs["input"], *args, **{name: value for name, value in kwargs.items() if name != "input"})
        why = getattr(func, "__name__", "an operation")
        return func(*plain(args, why), **plain(kwargs, why))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        if not callable(getattr(Tensor, name)):
            return getattr(self._real(name), name)
        return functools.partial(self._write if name.endswith("_") else self._read, name)

    def __getitem__(self, key: Any) -> Any:
        return self._real("indexing")[plain(key)]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._write("__setitem__", key, value)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._real("iteration"))

    # By these torch.as_tensor, asarray and tensor read what is no tensor; without them they ask for one element after the other.
    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._values().clone().__dlpack__(**kwargs)  # a copy: a write there would not be noticed here

    def __dlpack_device__(self) -> Any:
        return self._values().__dlpack_device__()

    def _values(self) -> Tensor:
        """Without a gradient; an error where the caller would lose one."""
        if torch.is_grad_enabled() and self.requires_grad:
            raise RuntimeError(
                "torch.as_tensor, asarray, tensor and DLPack take no gradient from these logits, which are a stand-in for a "
                "tensor; pass outputs.logits.materialize(), or outputs.logits.detach() for the values alone"
            )
        return self._real("as_tensor").detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._real("pickling").detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self._real("deepcopy").detach().clone()

    def __hash__(self) -> int:
        return id(self)


def plain(value: Any, why: str = "an operation") -> Any:
    """``value`` with the real tensor in place of every symbolic one; looks into lists, tuples and dictionaries."""
    if isinstance(value, Symbolic):
        return value._real(why)
    if type(value) in (list, tuple):
        return type(value)([plain(each, why) for each in value])
    if type(value) is dict:
        return {key: plain(each, why) for key, each in value.items()}
    return value


def split_index(key: Any, ndim: int) -> tuple[Any, slice | None] | None:
    """The ``key`` of a [..., V] tensor of ``ndim`` dimensions as a key of a [..., D] tensor and a slice of V.

    Returns:
        (key, None) where the last dimension is left alone, (key, slice) where it is sliced, and None where it is
        indexed in any other way or the key is no plain one (lists, arrays, booleans, strides, too many indices).
    """
    keys = key if isinstance(key, tuple) else (key,)
    used = 0  # dimensions that the key consumes
    for each in keys:
        if isinstance(each, Tensor):
            used += each.dim() if each.dtype in (torch.bool, torch.uint8) else 1
        elif isinstance(each, slice) or (isinstance(each, int) and not isinstance(each, bool)):
            used += 1
        elif each is not None and each is not Ellipsis:
            return None
    dots = len([each for each in keys if each is Ellipsis])
    if used > ndim or dots > 1:
        return None
    if not keys or keys[-1] is Ellipsis or (dots == 0 and used < ndim):
        return keys, None
    last = keys[-1]
    if not isinstance(last, slice) or last.step not in (None, 1):
        return None
    whole = last.start is None and last.stop is None
    return (*keys[:-1], slice(None)), None if whole else last


def forbidden_words(key: Any, value: Any, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
    """The words [W] to which ``logits[key] = value`` gives probability zero at every token; None where it does not.

    ``logits`` are [..., V] of ``shape`` and ``dtype``; ``value`` is then the smallest number of the dtype, or less.
    """
    keys = key if isinstance(key, tuple) else (key,)
    tokens, words = keys[:-1], keys[-1]
    everywhere = len(keys) == len(shape) and all(isinstance(each, slice) and each == slice(None) for each in tokens)
    if not everywhere and not (len(tokens) == 1 and tokens[0] is Ellipsis):
        return None
    if (
        not isinstance(value, (int, float))
        or value > torch.finfo(dtype).min
        or not isinstance(words, (list, slice, Tensor))
    ):
        return None
    chosen = torch.arange(shape[-1])[words.cpu() if isinstance(words, Tensor) else words]
    return chosen if chosen.dim() == 1 else None


def closed_form(ops: tuple[Op, ...]) -> tuple[float, float | None] | None:
    """(logit_scale, softcap) with which the loss gives what was recorded; None where there is no such pair.

    Any run of scales, then at most one tanh, then any run of scales is ``c · tanh(s · z)``, which is a scale of
    ``s · c`` with a softcap of ``c``. Casts and device moves do not matter: the loss is computed in float32. Forbidden words
    are the bias's business, for logits that nothing else was done to.
    """
    scale, cap = 1.0, None
    if any(name == "forbid" for name, _ in ops):
        return (scale, cap) if all(name in ("forbid", "to") for name, _ in ops) else None
    for name, value in ops:
        if name == "tanh":
            if cap is not None:
                return None
            cap = 1.0
        elif name != "to":
            if value == 0:
                return None
            factor = value if name == "mul" else 1.0 / value
            if cap is None:
                scale *= factor
            else:
                cap *= factor
    if cap is not None:
        scale *= cap
    usable = scale > 0 and math.isfinite(scale) and (cap is None or (cap > 0 and math.isfinite(cap)))
    return (scale, cap) if usable else None


def is_op(name: str, value: Any) -> bool:
    """True when the operation ``name`` with this operand can stand in a list of ``Op``."""
    return name == "tanh" or (isinstance(value, (int, float)) and not isinstance(value, bool))


def cast_targets(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.dtype | torch.device] | None:
    """The floating dtypes and devices that ``Tensor.to`` is asked for; None where it is asked for something else besides."""
    rest = {name: value for name, value in kwargs.items() if name != "non_blocking"}
    targets = [rest.pop(name, None) for name in ("dtype", "device")]
    for arg in args[:2]:
        if isinstance(arg, (Tensor, Symbolic)):
            targets = [arg.dtype, arg.device]
        elif not isinstance(arg, bool):
            targets.append(arg)
    targets = [target for target in targets if target is not None]
    if rest or len(args) > 2 or not all(floating_or_device(target) for target in targets):
        return None
    return [target if isinstance(target, torch.dtype) else full_device(target) for target in targets]


def floating_or_device(target: Any) -> bool:
    """True for a floating dtype and for whatever names a device."""
    return target.is_floating_point if isinstance(target, torch.dtype) else isinstance(target, (torch.device, str, int))


def full_device(target: torch.device | str | int) -> torch.device:
    """A device with its index, as tensors have it: ``"cuda"`` is the current GPU."""
    device = torch.device(target)
    return device if device.type == "cpu" or device.index is not None else torch.empty(0, device=device).device


def _special(name: str, way: str) -> Callable[..., Any]:
    """A special method, which Python looks up on the class and never in ``__getattr__``."""

    def method(self: Symbolic, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, way)(name, *args, **kwargs)

    method.__name__ = name
    return method


# fmt: off
_READING = (
    "abs", "add", "and", "array", "bool", "contains", "eq", "float", "floordiv", "ge", "gt", "index", "int", "invert",
    "le", "lt", "matmul", "mod", "mul", "ne", "neg", "or", "pos", "pow", "radd", "rfloordiv", "rmatmul", "rmul", "rpow",
    "rsub", "rtruediv", "sub", "truediv", "xor",
)
_WRITING = ("iadd", "iand", "ifloordiv", "imod", "imul", "ior", "ipow", "isub", "itruediv", "ixor")
# fmt: on
for _word in _READING:
    setattr(Symbolic, f"__{_word}__", _special(f"__{_word}__", "_read"))
for _word in _WRITING:
    setattr(Symbolic, f"__{_word}__", _special(f"__{_word}__", "_write"))


def function_applied_to(mine: Callable[[Any], bool]) -> str | None:
    """The ``torch.autograd.Function`` that is being applied to an object that is ``mine``: it takes that for no tensor."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code, names = frame.f_code, frame.f_locals
        if code is _APPLY and any(map(mine, names.get("args", ()))):
            return getattr(names.get("cls"), "__name__", "torch.autograd.Function")
        # Its forward(ctx, …), by what it was called with
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
        given = [names.get(name) for name in code.co_varnames[:count]]
        if given and isinstance(given[0], torch._C._FunctionBase):
            flat = [each for value in given for each in (value if type(value) is tuple else (value,))]
            if any(map(mine, flat)):
                return type(given[0]).__name__.removesuffix("Backward")
        frame = frame.f_back
    return None
