"""Causal LMs of the shape of well-known ones, built from their configuration alone: random weights, no download."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

EOS = 0  # the tokenizer of hf_cce.diagnostics.text gives its end-of-text token this id


@dataclass(frozen=True)
class Shape:
    """What decides size and speed of a decoder; the head is tied to the embedding in all of them."""

    family: str  # "llama" or "qwen2"
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    initializer_range: float = 0.02


SHAPES = {
    "qwen2.5-0.5b": Shape("qwen2", 896, 24, 14, 2, 4864, 151_936, 1_000_000.0, 1e-6),
    "smollm2-135m": Shape("llama", 576, 30, 9, 3, 1536, 49_152, 100_000.0, 1e-5, 1 / 24),
    "llama-3.2-1b": Shape("llama", 2048, 16, 32, 8, 8192, 128_256, 500_000.0),
    "tiny": Shape("llama", 64, 2, 4, 2, 128, 512),
}


def config_of(shape: Shape, sequence: int = 8192) -> Any:
    """The configuration of Transformers for ``shape``, for up to ``sequence`` tokens; caches are off."""
    from transformers import LlamaConfig, Qwen2Config

    cls = {"llama": LlamaConfig, "qwen2": Qwen2Config}[shape.family]
    return cls(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=max(8192, sequence),
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        rms_norm_eps=shape.norm_eps,
        initializer_range=shape.initializer_range,
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=EOS,
        eos_token_id=EOS,
    )
