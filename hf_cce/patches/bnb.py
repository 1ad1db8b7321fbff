"""bitsandbytes: defer the product of a 4-bit LM head.

Cause: ``Linear4bit.forward`` multiplies by ``bitsandbytes.matmul_4bit``, an autograd function, which calls nothing on its input
that a ``HeadInput`` could intercept. Versions: bitsandbytes 0.50. Can be removed when Linear4bit multiplies by a torch function.

How: ``Linear4bit.forward`` looks up that name at each call. The replacement handles a ``HeadInput`` and passes everything else
on. The rest of the forward (casts to the compute dtype and back) is unchanged, and so are the wrappers of PEFT and accelerate.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from hf_cce.deferred.head_input import HeadInput, deferred_product
from hf_cce.patches.marking import replace
from hf_cce.quantized import bitsandbytes_weight


def install() -> None:
    """Replace ``matmul_4bit``, once; do nothing if bitsandbytes is not loaded."""
    bitsandbytes: Any = sys.modules.get("bitsandbytes")
    if hasattr(bitsandbytes, "matmul_4bit"):
        replace(bitsandbytes, "matmul_4bit", _matmul)


def _matmul(original: Any, A: Any, B: Tensor, quant_state: Any, out: Any = None, bias: Tensor | None = None) -> Any:
    if not isinstance(A, HeadInput):
        return original(A, B, quant_state, out=out, bias=bias)

    def product(hidden: Tensor, bias: Tensor | None) -> Tensor:
        return original(hidden, B, quant_state, bias=bias)

    weight = bitsandbytes_weight(B, quant_state, A.hidden_states.dtype, product)
    return product(A.hidden_states, bias) if weight is None else deferred_product(A.hidden_states, weight, bias, A.call)
