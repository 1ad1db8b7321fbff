"""Matrix products by cuBLAS, accumulated in float32 where the result is."""

from __future__ import annotations

import torch
from torch import Tensor


def multiply_add(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """``total`` = a · b, added to what is there unless it is the ``first``, accumulated in float32 when ``total`` is."""
    if total.is_meta:  # launches are listed; asking PyTorch for the shape would import a second's worth of modules
        return
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
