"""Matrix products by cuBLAS, accumulated in float32 where the result is."""

from __future__ import annotations

import torch
from torch import Tensor

# cuBLAS is several times slower on 16-bit numbers if the length of a row is no multiple of this.
ALIGNED = 8


def _beyond(length: int, stride: int, x: Tensor) -> int:
    """Entries of a row of ``x`` after the last multiple of ``ALIGNED``, multiplied apart; 0 where it does not matter."""
    return length % ALIGNED if stride == 1 and length > ALIGNED and x.is_cuda and x.element_size() == 2 else 0


def multiply_add(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """``total`` += a · b, or = for the ``first`` product of a sum; summed in float32 if ``total`` is float32."""
    if columns := _beyond(b.shape[1], b.stride(0), b):
        multiply_add(total[:, :-columns], a, b[:, :-columns], first)
        multiply_add(total[:, -columns:], a, b[:, -columns:], first)
        return
    inner = _beyond(a.shape[1], a.stride(1), a)
    if inner and total.dtype == torch.float32:
        multiply_add(total, a[:, :-inner], b[:-inner], first)
        a, b, first = a[:, -inner:], b[-inner:], False
    if total.dtype == a.dtype:
        if first:
            torch.mm(a, b, out=total)
        else:
            total.addmm_(a, b)
    elif not a.is_cuda:  # the interpreter
        product = a.float() @ b.float()
        total.copy_(product) if first else total.add_(product)
    elif first:
        torch.mm(a, b, out_dtype=torch.float32, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a · b, rounded once."""
    if not _beyond(a.shape[1], a.stride(1), a):
        return a @ b
    total = torch.empty((a.shape[0], b.shape[1]), device=a.device, dtype=torch.float32)
    multiply_add(total, a, b, first=True)
    return total.to(a.dtype)
