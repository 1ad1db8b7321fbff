"""Make Triton's interpreter round to bfloat16 as a GPU does, and make it faster: kernel tests on a CPU spend most time in it."""

from dataclasses import replace
from typing import Any

import numpy as np


def configure() -> None:
    _round_to_nearest()
    _speed_up()


def _round_to_nearest() -> None:
    """Round float32 to the nearest bfloat16; Triton's interpreter truncates."""
    from triton import language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_float(x: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) == (tl.bfloat16, tl.float32):
            return (x.astype(np.uint32) << 16).view(np.float32)
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(x, source, target, mode)
        bits = x.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)

    interpreter._convert_float = convert_float


def _speed_up() -> None:
    """Leave out work without effect; do nothing with a version of Triton that is written otherwise."""
    from triton import language as tl
    from triton.runtime import interpreter

    patch, scope = getattr(interpreter, "_patch_lang", None), getattr(interpreter, "_LangPatchScope", None)
    options = getattr(getattr(interpreter, "interpreter_builder", None), "options", None)
    np_dtype = getattr(interpreter, "_get_np_dtype", None)
    if None in (patch, scope, np_dtype) or not hasattr(options, "sanitize_overflow"):
        return
    seen: set[int] = set()  # ids of the modules of functions, which live as long as the process
    patched: set[int] = set()

    def patch_once(function: Any) -> Any:
        """Replace the functions of ``triton.language`` for good, instead of anew in each call of a function by a kernel."""
        if id(function.__globals__) not in seen:
            seen.add(id(function.__globals__))
            languages = {id(x) for x in function.__globals__.values() if x is tl or x is tl.core}
            if not languages <= patched:
                patch(function)
                patched.update(languages)
        return scope()

    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = _remember(np_dtype)
    _remember_types(tl.core)
    if not options.debug:
        # After each int32 sum and product, the interpreter looks for an overflow in int64; without `debug` it asserts nothing.
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


def _remember(function: Any) -> Any:
    """Return ``function`` of a type, computed once for each name of a type: not all types can be keys."""
    found: dict[str, Any] = {}

    def remembering(type_: Any) -> Any:
        name = str(type_)
        if name not in found:
            found[name] = function(type_)
        return found[name]

    return remembering


def _remember_types(core: Any) -> None:
    """Let tensors, and their types, of one shape share what is derived from the shape."""
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    types: dict[Any, dict[str, Any]] = {}
    shapes: dict[str, dict[str, Any]] = {}  # by the names of types

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (str(element_ty), *map(int, shape))
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = vars(self).copy()
        vars(self).update(types[key], element_ty=element_ty)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in shapes:
            make_tensor(self, handle, type)
            shapes[type.name] = {"shape": self.shape, "numel": self.numel}
        vars(self).update(shapes[type.name], handle=handle, type=type, dtype=type.scalar)

    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor
