"""bitsandbytes: the product of a 4-bit LM head is put off.

Cause: ``Linear4bit.forward`` multiplies by ``bitsandbytes.matmul_4bit``, an autograd function, which asks its input nothing that
could be answered. Versions: bitsandbytes 0.50. It can go when Linear4bit multiplies by a function of torch.

How: ``Linear4bit.forward`` looks that name up at each call. It answers the input of a head whose product is to be put off, and
passes everything else on; what else the forward does (casts to the compute dtype and back) stays its own, and so does what PEFT
and accelerate wrap around it.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import Tensor

from hf_cce.deferred.head_input import HeadInput, linear
from hf_cce.quantized import bitsandbytes_weight

_OURS = "_hf_cce"


def enter() -> None:
    """From now on 4-bit heads are answered; nothing to do without bitsandbytes."""
    bitsandbytes: Any = sys.modules.get("bitsandbytes")
    original = getattr(bitsandbytes, "matmul_4bit", None)
    if original is not None and not hasattr(original, _OURS):
        bitsandbytes.matmul_4bit = functools.wraps(original)(functools.partial(_matmul, original))
        setattr(bitsandbytes.matmul_4bit, _OURS, True)


def _matmul(original: Any, A: Any, B: Tensor, quant_state: Any, out: Any = None, bias: Tensor | None = None) -> Any:
    if not isinstance(A, HeadInput):
        return original(A, B, quant_state, out=out, bias=bias)

    def product(hidden: Tensor, bias: Tensor | None) -> Tensor:
        return original(hidden, B, quant_state, bias=bias)

    weight = bitsandbytes_weight(B, quant_state, A.hidden_states.dtype, product)
    return product(A.hidden_states, bias) if weight is None else linear(A.hidden_states, weight, bias, A.call)
