"""A tiny model of any class of Transformers' mappings, from its own configuration, and a batch for it."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from models import batch, randomise
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from hf_cce.bench.tiny import WORDS, tiny_config
from hf_cce.bench.tiny_options import OPTIONS

CAUSAL = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))
IMAGE_TEXT = sorted(set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()) - set(CAUSAL))

# What a call of the unpatched class needs besides input_ids, attention_mask and labels.
FORWARD: dict[str, dict[str, Any]] = {
    "BltForCausalLM": {"use_cache": False},  # its decoder reads the cache of its encoder otherwise
    "GitForCausalLM": {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)},  # its loss skips them
}


def build(name: str) -> Any:
    """The tiny model of a class, in fp32 and training mode, from a fixed seed."""
    cls = getattr(transformers, name)
    config = tiny_config(cls.config_class, OPTIONS.get(name))
    vision = getattr(config, "vision_config", None)
    if getattr(vision, "model_type", "") == "gemma3n_vision":  # its tower is one of timm's; the config checks types
        vars(config)["vision_config"] = tiny_config(transformers.SiglipVisionConfig)
    torch.manual_seed(0)
    return randomise(cls(config)).train()


def text(name: str, **options: Any) -> dict[str, Any]:
    """A batch of text for it: ids that mean neither an image nor anything else special."""
    return {**batch(words=WORDS, **options), **FORWARD.get(name, {})}
