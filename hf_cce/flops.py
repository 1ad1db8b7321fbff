"""FLOP formulas of hf_cce's operators, which ``torch.utils.flop_counter.FlopCounterMode`` would otherwise count as zero.

The formulas count the matrix products of full logits, so that MFU stays comparable: recomputation in the backward pass and tiles
skipped by the filter do not change the count.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import torch

COUNTER = "torch.utils.flop_counter"


def _gradients(hidden: Any, weight: Any, out_shape: Any) -> int:
    """Count one product for each gradient of a matrix among the outputs; that of the bias is a sum."""
    return sum(len(shape) == 2 for shape in out_shape) * 2 * hidden[0] * weight[0] * weight[1]


def _forward(hidden: Any, weight: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    """Count the logits, and gradients that ``hf_cce::cross_entropy`` computes in its forward pass."""
    return 2 * hidden[0] * weight[0] * weight[1] + _gradients(hidden, weight, out_shape)


def _backward(*inputs: Any, out_shape: Any, **_: Any) -> int:
    return _gradients(inputs[4], inputs[5], out_shape)


def register() -> None:
    """Register the formulas, after the operators are defined; a counter copies the formulas when it is created.

    In a CUDA build of PyTorch without Triton, importing the counter logs a warning, so it must already be imported.
    """
    if COUNTER not in sys.modules and torch.version.cuda and importlib.util.find_spec("triton") is None:
        return
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    formulas = {"cross_entropy": _forward, "logit_stats": _forward, "logit_stats_backward": _backward}
    for name, formula in formulas.items():
        operator = getattr(torch.ops.hf_cce, name)
        if operator not in flop_registry:  # already registered after a reload of this module
            register_flop_formula(operator)(formula)
