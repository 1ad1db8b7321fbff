"""Our operators for ``torch.utils.flop_counter.FlopCounterMode``, which would count them as nothing.

Counted is what full logits would cost, the matrix products alone, so that shares of a GPU's peak (MFU) stay comparable: what is
computed again in the backward pass, or left out by the filter, changes no figure.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import torch

COUNTER = "torch.utils.flop_counter"


def _product(hidden: Any, weight: Any) -> int:
    return 2 * hidden[0] * weight[0] * weight[1]


def _forward(hidden: Any, weight: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return _product(hidden, weight)


def _cross_entropy(hidden: Any, weight: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    """Gradients that form in the forward pass are counted there: no operator runs in the backward pass."""
    formed = sum(len(shape) == 2 for shape in out_shape[3:5])
    return (1 + formed) * _product(hidden, weight)


def _backward(
    g1: Any, g2: Any, g3: Any, g4: Any, hidden: Any, weight: Any, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    needed = sum(len(shape) == 2 for shape in out_shape[:2])  # that of the bias is a sum, no product
    return needed * _product(hidden, weight)


def register() -> None:
    """Register the formulas; a counter copies them when it is made. The operators exist by now.

    Importing the counter takes 0.1 s, since it loads Triton, which the kernels and Transformers' models load, too. In a CUDA
    build of PyTorch without Triton it logs a warning, so there the counter is only served if it was imported first.
    """
    if COUNTER not in sys.modules and torch.version.cuda and importlib.util.find_spec("triton") is None:
        return
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    formulas: dict[str, Any] = {
        "cross_entropy": _cross_entropy,
        "logit_stats": _forward,
        "logit_stats_backward": _backward,
    }
    for name, formula in formulas.items():
        operator = getattr(torch.ops.hf_cce, name)
        if operator not in flop_registry:  # after a reload they are there
            register_flop_formula(operator)(formula)
