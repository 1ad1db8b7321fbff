"""Matrix products by PyTorch; 16-bit products are summed in float32 where possible."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_cce.spec import accumulation_dtype

# For 16-bit dtypes, cuBLAS is several times slower if the row length is not a multiple of this.
ALIGNED = 8


def supports_fp32_out(x: Tensor) -> bool:
    """Return True if PyTorch can write float32 products of 16-bit operands like ``x``."""
    return x.is_cuda and torch.version.cuda is not None


def _unaligned_tail(length: int, stride: int, x: Tensor) -> int:
    """Return how many entries at the end of each row of ``x`` to multiply separately, so that the others are aligned."""
    return length % ALIGNED if stride == 1 and length > ALIGNED and x.is_cuda and x.element_size() == 2 else 0


def multiply_add(total: Tensor, a: Tensor, b: Tensor, first: bool = False) -> None:
    """Add a · b to ``total``, or overwrite ``total`` if ``first``, in the dtype of ``total``."""
    if columns := _unaligned_tail(b.shape[1], b.stride(0), b):
        multiply_add(total[:, :-columns], a, b[:, :-columns], first)
        multiply_add(total[:, -columns:], a, b[:, -columns:], first)
        return
    inner = _unaligned_tail(a.shape[1], a.stride(1), a)
    if inner and total.dtype == torch.float32:
        multiply_add(total, a[:, :-inner], b[:-inner], first)
        a, b, first = a[:, -inner:], b[-inner:], False
    if total.dtype != a.dtype or total.dtype != b.dtype:
        if supports_fp32_out(a):
            if first:
                torch.mm(a, b, out_dtype=total.dtype, out=total)
            else:
                torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
            return
        a, b = a.to(total.dtype), b.to(total.dtype)
    if first:
        torch.mm(a, b, out=total)
    else:
        total.addmm_(a, b)


def multiply_rounded(a: Tensor, b: Tensor) -> Tensor:
    """Return a · b in the dtype of ``a``, rounded once."""
    return multiply(a, b).to(a.dtype) if _unaligned_tail(a.shape[1], a.stride(1), a) else a @ b


def multiply(a: Tensor, b: Tensor, may_round: bool = False) -> Tensor:
    """Return a · b in the accumulation dtype. ``may_round``: round to 16 bits rather than cast 16-bit operands."""
    acc_dtype = accumulation_dtype(a.dtype)
    if a.dtype == acc_dtype:
        return a @ b
    if may_round and not supports_fp32_out(a):
        return (a @ b).to(acc_dtype)
    total = torch.empty((a.shape[0], b.shape[1]), device=a.device, dtype=acc_dtype)
    multiply_add(total, a, b, first=True)
    return total
