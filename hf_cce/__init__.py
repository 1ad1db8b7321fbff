"""Memory-efficient cross entropy for Transformers: after ``apply_cce(model)``, training does not materialize logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_cce.api import apply_cce, remove_cce, supported_models
    from hf_cce.callback import CCECallback
    from hf_cce.config import CCEConfig, CCEWarning
    from hf_cce.divergence import TeacherHead, TeacherTopK, linear_divergence
    from hf_cce.filter_state import FilterState
    from hf_cce.loss import linear_cross_entropy, linear_log_probs

__version__ = "0.1.0"

__all__ = [
    "CCECallback",
    "CCEConfig",
    "CCEWarning",
    "FilterState",
    "TeacherHead",
    "TeacherTopK",
    "apply_cce",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_log_probs",
    "remove_cce",
    "supported_models",
]

_NAMES = {
    "api": ("apply_cce", "remove_cce", "supported_models"),
    "callback": ("CCECallback",),
    "config": ("CCEConfig", "CCEWarning"),
    "divergence": ("TeacherHead", "TeacherTopK", "linear_divergence"),
    "filter_state": ("FilterState",),
    "loss": ("linear_cross_entropy", "linear_log_probs"),
}


def __getattr__(name: str) -> Any:
    """Import the module of a public name on first use, so that ``import hf_cce`` imports no torch, Triton or Trainer."""
    from importlib import import_module

    for module, names in _NAMES.items():
        if name in names:
            globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
