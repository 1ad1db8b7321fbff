"""Support status of every model type of the installed Transformers: supported, special or refused, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hf_cce.patches.refused import REFUSED, SPECIAL

Status = Literal["supported", "special", "refused"]


@dataclass(frozen=True)
class Family:
    model_type: str
    cls: str
    status: Status  # special: trains correctly, but [tokens, vocabulary] values are still materialized
    reason: str  # why it is special or refused; empty if supported


def class_names() -> dict[str, str]:
    """Return the class name by model type: the causal LM if there is one, else the multimodal model."""
    from transformers.models.auto import modeling_auto

    names: dict[str, str] = {}
    for mapping in ("MULTIMODAL_LM", "IMAGE_TEXT_TO_TEXT", "CAUSAL_LM"):  # Transformers 5.0 has no MULTIMODAL_LM
        names |= getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {})
    return names


def status_of(cls: str) -> tuple[Status, str]:
    if cls in REFUSED:
        return "refused", REFUSED[cls]
    return ("special", SPECIAL[cls]) if cls in SPECIAL else ("supported", "")


def families() -> list[Family]:
    """Return all model types of the installed Transformers that have a language-modeling loss, sorted by name."""
    return [Family(name, cls, *status_of(cls)) for name, cls in sorted(class_names().items())]
