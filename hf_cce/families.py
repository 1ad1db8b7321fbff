"""What is known of every model type of the installed Transformers: supported, special or refused, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hf_cce.patches.refused import REFUSED, SPECIAL

Status = Literal["supported", "special", "refused"]


@dataclass(frozen=True)
class Family:
    """One model type and the class that it stands for."""

    model_type: str
    cls: str
    status: Status  # special: trained right, but tokens x vocabulary numbers are held all the same
    reason: str  # why it is special or refused; empty for a supported one


def class_names() -> dict[str, str]:
    """The class of every model type: its causal LM, and where it has none the one for images, sound and text."""
    from transformers.models.auto import modeling_auto

    names: dict[str, str] = {}
    for mapping in ("MULTIMODAL_LM", "IMAGE_TEXT_TO_TEXT", "CAUSAL_LM"):  # Transformers 5.0 has no MULTIMODAL_LM
        names |= getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {})
    return names


def status_of(cls: str) -> tuple[Status, str]:
    """Status of the class of that name, and the reason where it is special or refused."""
    if cls in REFUSED:
        return "refused", REFUSED[cls]
    return ("special", SPECIAL[cls]) if cls in SPECIAL else ("supported", "")


def families() -> list[Family]:
    """All model types of the installed Transformers that have a language model's loss, sorted by name."""
    return [Family(name, cls, *status_of(cls)) for name, cls in sorted(class_names().items())]
