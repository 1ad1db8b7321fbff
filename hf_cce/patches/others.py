"""Liger, Apple's CCE and Unsloth: detect another fused loss on a model, so that the two do not conflict.

Cause: each replaces the causal LM's ``forward``, its loss function or ``torch.nn.functional.cross_entropy`` by its own function,
which bypasses the head or reads the logits. Versions: liger-kernel 0.8.5, Axolotl 0.19.0, unsloth and unsloth_zoo 2026.10.9,
cut_cross_entropy.transformers of Apple and of Axolotl's fork. Can be removed when none of them replaces a forward any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import nn

# Prefixes of the replacement's ``__module__``; its name for the user; how to switch it off.
_OTHERS = (
    (
        ("liger_kernel.",),
        "Liger's cross-entropy",
        'with liger_kernel_config={"fused_linear_cross_entropy": False, "cross_entropy": False} beside use_liger_kernel=True, '
        "or the same two arguments of apply_liger_kernel_to_…(); its other kernels may stay",
    ),
    (
        ("axolotl.integrations.liger.",),
        "Liger's cross-entropy, from Axolotl's plugin,",
        "with liger_fused_linear_cross_entropy: false and liger_cross_entropy: false in the YAML file",
    ),
    (
        ("cut_cross_entropy.",),
        "Apple's cut cross-entropy",
        "by leaving out cce_patch(), or in Axolotl the CutCrossEntropyPlugin",
    ),
    (
        ("unsloth.", "unsloth_zoo.", "unsloth_compiled_module_"),  # unsloth_zoo writes a module for each model type
        "Unsloth",
        "by loading the model with transformers.AutoModelForCausalLM, without importing unsloth",
    ),
)


def why_other(model: nn.Module | type) -> str | None:
    """Return which other fused loss is active on a model or a model class, and how to switch it off; None if there is none."""
    for function in _functions(model):
        module = getattr(function, "__module__", None) or ""
        for prefixes, name, how in _OTHERS:
            if module.startswith(prefixes):
                where = f"{module}.{getattr(function, '__qualname__', '')}"
                return f"{name} is active on it ({where}). Switch it off {how}, and start a new process"
    return None


def _functions(model: nn.Module | type) -> Iterator[Any]:
    """Yield every function that the loss of ``model`` uses and that others replace, and the functions that each wraps."""
    from transformers.loss.loss_utils import LOSS_MAPPING

    # Not model.loss_function: without a loss_type, that property logs a warning.
    by_type = LOSS_MAPPING.get(str(getattr(model, "loss_type", None)), LOSS_MAPPING["ForCausalLM"])
    loss = vars(model).get("_loss_function") or by_type
    cls = model if isinstance(model, type) else type(model)
    for function in (getattr(model, "forward", None), getattr(cls, "forward", None), loss, F.cross_entropy):
        while function is not None:
            yield function
            function = getattr(function, "__func__", None) or getattr(function, "__wrapped__", None)
