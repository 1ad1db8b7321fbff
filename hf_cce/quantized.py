"""Frozen quantized weights [V, D] of bitsandbytes (4-bit) and torchao (int8 and float8, weight-only), dequantized when needed.

The loss uses a ``FrozenWeight``, which has no storage, like the tensor that it dequantizes to. Loops over slabs of the vocabulary
dequantize one slab at a time. Neither library is imported here: code that has such a weight has imported it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

Read = Callable[[int, int, torch.dtype], Tensor]  # (start, stop, dtype): dequantized rows [start, stop)
Product = Callable[[Tensor, Tensor | None], Tensor]  # (hidden, bias or None): the library's own F.linear
_ATEN = torch.ops.aten


class FrozenWeight(Tensor):
    """Rows of a quantized weight. Slices of rows and casts are FrozenWeights again; other operations dequantize it."""

    read: Read
    product: Product | None  # None for a slice of the weight
    start: int
    keeps_dtype = False  # True if ``product`` returns the dtype of the hidden states even under autocast

    @staticmethod
    def of(
        read: Read,
        product: Product | None,
        shape: Any,
        dtype: torch.dtype,
        device: torch.device,
        start: int = 0,
    ) -> FrozenWeight:
        new = Tensor._make_wrapper_subclass(FrozenWeight, shape, dtype=dtype, device=device)
        new.read, new.product, new.start = read, product, start
        return new

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FrozenWeight(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def dense(self) -> Tensor:
        """Return the dequantized rows."""
        with torch.no_grad():
            return self.read(self.start, self.start + self.shape[0], self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run F.linear with the whole weight in the library itself, so that materialized logits are the original ones."""
        kwargs = kwargs or {}
        if func is torch._C._nn.linear and len(args) == 3 and not kwargs:
            hidden, weight, bias = args
            if isinstance(weight, FrozenWeight) and weight.product is not None:
                return weight.product(hidden, bias)
        return Tensor.__torch_function__(func, (), args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs, first = kwargs or {}, args[0]
        if isinstance(first, FrozenWeight):
            is_cast = func is _ATEN._to_copy.default and set(kwargs) == {"dtype"}
            if is_cast or func in (_ATEN.detach.default, _ATEN.alias.default):
                dtype = kwargs.get("dtype", first.dtype)
                return FrozenWeight.of(first.read, first.product, first.shape, dtype, first.device, first.start)
            if func is _ATEN.slice.Tensor and args[1] == 0 and len(args) < 5:
                start, stop, _ = slice(*(*args[2:4], None, None)[:2]).indices(first.shape[0])
                shape = (max(0, stop - start), first.shape[1])
                return FrozenWeight.of(first.read, None, shape, first.dtype, first.device, first.start + start)
        args, kwargs = tree_map_only(FrozenWeight, FrozenWeight.dense, (args, kwargs))
        return func(*args, **kwargs)


def dense(weight: Tensor) -> Tensor:
    """Return ``weight`` as an ordinary tensor."""
    return weight.dense() if isinstance(weight, FrozenWeight) else weight


def scratch_per_row(weight: Tensor) -> int:
    """Return the bytes that dequantizing a row of ``weight`` takes: a float32 intermediate, and the result."""
    return 8 * weight.shape[1] if isinstance(weight, FrozenWeight) else 0


def torchao_weight(weight: Any, hidden: Tensor, cast: torch.dtype | None) -> FrozenWeight | None:
    """Return a FrozenWeight for a frozen int8 or float8 weight of torchao, else None, also if matmuls quantize ``hidden``.

    Its dtype is ``cast`` under autocast; otherwise that of ``hidden`` for int8, and that of the weight for float8.
    """
    torchao: Any = sys.modules.get("torchao.quantization")
    kinds = [getattr(torchao, name, None) for name in ("Int8Tensor", "Float8Tensor")]
    if type(weight) not in kinds or weight.dim() != 2 or weight.requires_grad:
        return None
    if any(getattr(weight, name, None) is not None for name in ("act_quant_kwargs", "act_pre_scale")):
        return None

    def read(start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return weight[start:stop].dequantize(dtype)

    def product(hidden: Tensor, bias: Tensor | None) -> Tensor:
        fits = is_int8 or hidden.dtype == weight.dtype
        return torch.nn.functional.linear(hidden, weight if fits else weight.dequantize(hidden.dtype), bias)

    is_int8 = type(weight).__name__ == "Int8Tensor"
    made = FrozenWeight.of(
        read, product, weight.shape, cast or (hidden.dtype if is_int8 else weight.dtype), weight.device
    )
    made.keeps_dtype = is_int8
    return made


def bitsandbytes_weight(packed: Tensor, state: Any, dtype: torch.dtype, product: Product) -> FrozenWeight | None:
    """Return a FrozenWeight for 4-bit data and its bitsandbytes ``QuantState``; None if the layout is not supported.

    Blocks that share a scale must not cross the end of a row: bitsandbytes dequantizes such weights differently on CPUs.
    """
    if state is None or len(state.shape) != 2 or getattr(state, "packing_format_for_cpu", False):
        return None
    functional: Any = sys.modules["bitsandbytes.functional"]
    (v, d), block = state.shape, state.blocksize
    if d % block:
        return None

    def read(start: int, stop: int, dtype: torch.dtype) -> Tensor:
        part, absmax = copy.copy(state), state.absmax
        if state.nested:
            absmax = functional.dequantize_blockwise(absmax, state.state2) + state.offset
        part.absmax, part.nested = absmax[start * d // block : stop * d // block].float(), False
        part.shape, part.dtype = torch.Size((stop - start, d)), dtype
        # Two values per byte. A tensor [1, …] would be taken for a transposed weight.
        part_packed = packed.detach().reshape(-1).view(torch.uint8)[start * d // 2 : stop * d // 2].view(-1, 1)
        return functional.dequantize_4bit(part_packed, part)

    return FrozenWeight.of(read, product, (v, d), dtype, packed.device)
