"""Causal LMs that are refused, by a table of classes or by rules, with the reason; and those that still make large tensors."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from hf_cce.head_checks import output_embeddings

_SEVERAL_HEADS = "it has one LM head per codebook and adds up their losses"
_NO_LOSS = "its forward takes no labels, so it computes no loss"
_SEVERAL_MODELS = "it combines several models and has no forward; pass the model that is trained, model.thinker"

REFUSED: dict[str, str] = {
    "MusicgenForCausalLM": _SEVERAL_HEADS,
    "MusicgenMelodyForCausalLM": _SEVERAL_HEADS,
    "ProphetNetForCausalLM": "its loss covers several predicted n-gram streams of one head",
    "Gemma4AssistantForCausalLM": _NO_LOSS,
    "Gemma4UnifiedAssistantForCausalLM": _NO_LOSS,
    "DiffusionGemmaForBlockDiffusion": _NO_LOSS,
    "PI0ForConditionalGeneration": _NO_LOSS,  # its labels are a robot's actions
    "Qwen2_5OmniForConditionalGeneration": _SEVERAL_MODELS,
    "Qwen3OmniMoeForConditionalGeneration": _SEVERAL_MODELS,
}

# The loss is correct, but a tensor of tokens x vocabulary is still allocated.
SPECIAL: dict[str, str] = {
    "BltForCausalLM": "its loss materializes no logits, but its byte patcher, a small LM with its own head, materializes its own",
    "DoryForCausalLM": "its LM head scales each logit by a separate weight, so full logits are materialized",
    "IdeficsForVisionText2Text": (
        "its LM head is not a plain linear layer (additional vocabulary entries are computed separately), so full logits are "
        "materialized"
    ),
}


def why_refuse_class(cls: type) -> str | None:
    """Return why no instance of ``cls`` can be patched; None if one can."""
    for base in cls.__mro__:
        if base.__name__ in REFUSED:
            return REFUSED[base.__name__]
    forward: Any = getattr(cls, "forward", None)
    if forward is None or not hasattr(cls, "get_output_embeddings"):
        return "it is not a Transformers model"
    return None if _takes_labels(cls) else _NO_LOSS


def _takes_labels(cls: type) -> bool:
    """Return True if a forward in the MRO has labels, and those before it take **kwargs."""
    for base in cls.__mro__:
        if "forward" in vars(base):
            parameters = inspect.signature(getattr(base, "forward")).parameters  # noqa: B009  # mypy: not every class has it
            if "labels" in parameters:
                return True
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
                return False
    return False


def why_refuse(model: nn.Module) -> str | None:
    """Return why this instance cannot be patched, because of its class or its head; None if it can."""
    reason = why_refuse_class(type(model))
    if reason is not None:
        return reason
    head = output_embeddings(model)
    if head is None:
        return "it has no LM head (get_output_embeddings() gives None)"
    if isinstance(head, (nn.ModuleList, nn.ModuleDict, list, tuple)):
        return "it has several LM heads"
    if not isinstance(head, nn.Module):
        return f"its LM head is a {type(head).__name__}, not a module"
    return None
