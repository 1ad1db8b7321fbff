"""Matrix products with cuBLAS; sums of several products are accumulated in float32 if the output is float32."""

from __future__ import annotations

import torch
from torch import Tensor

# For 16-bit dtypes, cuBLAS is several times slower if the row length is not a multiple of this.
ALIGNED = 8


def _unaligned_tail(length: int, stride: int, x: Tensor) -> int:
    """Return how many entries at the end of each row of ``x`` to multiply separately, so that the others are aligned."""
    return length % ALIGNED if stride == 1 and length > ALIGNED and x.is_cuda and x.element_size() == 2 else 0


def multiply_add(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Add a · b to ``total``, or overwrite ``total`` if ``first``; accumulate in float32 if ``total`` is float32."""
    if columns := _unaligned_tail(b.shape[1], b.stride(0), b):
        multiply_add(total[:, :-columns], a, b[:, :-columns], first)
        multiply_add(total[:, -columns:], a, b[:, -columns:], first)
        return
    inner = _unaligned_tail(a.shape[1], a.stride(1), a)
    if inner and total.dtype == torch.float32:
        multiply_add(total, a[:, :-inner], b[:-inner], first)
        a, b, first = a[:, -inner:], b[-inner:], False
    if total.dtype == a.dtype:
        if first:
            torch.mm(a, b, out=total)
        else:
            total.addmm_(a, b)
    elif not a.is_cuda:  # Triton's interpreter
        product = a.float() @ b.float()
        total.copy_(product) if first else total.add_(product)
    elif first:
        torch.mm(a, b, out_dtype=torch.float32, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return a · b in the dtype of ``a``, rounded once."""
    if not _unaligned_tail(a.shape[1], a.stride(1), a):
        return a @ b
    total = torch.empty((a.shape[0], b.shape[1]), device=a.device, dtype=torch.float32)
    multiply_add(total, a, b, first=True)
    return total.to(a.dtype)
