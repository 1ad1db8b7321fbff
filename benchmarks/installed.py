"""Ways to compute the loss of a whole Transformers model, each installed as its own users would install it.

eager         Transformers' own loss, unmodified
compiled      torch.compile of that loss function; the head still materializes all logits
liger         Liger's own patch of the model, with only the fused linear cross entropy enabled
apple         Apple's linear_cross_entropy on the last hidden states (their package patches only some Transformers versions)
hf_cce        apply_cce(model)
hf_cce-exact  apply_cce(model, gradient_filter=None)
hf_cce-256mib apply_cce(model, memory_budget=256 << 20), for any number of tokens
hf_cce-2gib   apply_cce(model, memory_budget=2 << 30)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import torch

from hf_cce import CCEConfig, apply_cce


class Missing(Exception):
    """Raised when a loss cannot run here; the message says why."""


def install(model: Any, name: str) -> str:
    """Make training calls of ``model`` with labels use the loss ``name`` (one of ``LOSSES``).

    Returns:
        a description of what was installed, for the report.

    Raises:
        Missing: a required package or option is missing.
    """
    try:
        return LOSSES[name](model)
    except ImportError as error:
        raise Missing(f"{type(error).__name__}: {error}") from error


def _eager(model: Any) -> str:
    return f"{type(model).__name__} as it is"


def _compiled(model: Any) -> str:
    # dynamic=False: every step has the same shape, which is the best case for torch.compile.
    model.loss_function = torch.compile(model.loss_function, dynamic=False)
    return "model.loss_function = torch.compile(model.loss_function, dynamic=False)"


def _liger(model: Any) -> str:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance

    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:  # Liger itself would only log it
        raise Missing(f"Liger has no patch for model type {kind!r}")
    options = dict.fromkeys(("rope", "rms_norm", "swiglu", "cross_entropy"), False)
    _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=True, **options)
    if "forward" not in model.__dict__:
        raise Missing(f"Liger's patch left the forward of {type(model).__name__} as it was")
    return "_apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=True), its other kernels off"


def _apple(model: Any) -> str:
    try:
        from cut_cross_entropy.transformers import cce_patch  # missing from version 25.1.1 on PyPI
    except ImportError as error:
        why = f"{type(error).__name__}: {error}"
    else:
        try:
            cce_patch(model)
            return "cut_cross_entropy.transformers.cce_patch(model)"
        except Exception as error:  # it rejects model types and Transformers versions with various exceptions
            why = f"{type(error).__name__}: {error}"
    from cut_cross_entropy import linear_cross_entropy

    def forward(self: Any, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        hidden_states = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
        return SimpleNamespace(loss=linear_cross_entropy(hidden_states, self.lm_head.weight, labels, shift=True))

    model.forward = MethodType(forward, model)
    return f"linear_cross_entropy(hidden_states, lm_head.weight, labels, shift=True), its defaults; no cce_patch: {why}"


def _hf_cce(model: Any, **options: Any) -> str:
    # After a fallback, the measurements would be those of full logits.
    warnings.filterwarnings("error", message="hf_cce")
    apply_cce(model, **options)
    return f"apply_cce(model): {CCEConfig(**options)}"


LOSSES: dict[str, Callable[[Any], str]] = {
    "eager": _eager,
    "compiled": _compiled,
    "liger": _liger,
    "apple": _apple,
    "hf_cce": _hf_cce,
    "hf_cce-exact": partial(_hf_cce, gradient_filter=None),
    "hf_cce-256mib": partial(_hf_cce, memory_budget=256 << 20),
    "hf_cce-2gib": partial(_hf_cce, memory_budget=2 << 30),
}
