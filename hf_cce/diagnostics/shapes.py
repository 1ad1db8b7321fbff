"""Model configurations by name: known shapes and model types (no download), folders, and models on the hub."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_cce.diagnostics.machine import first_line

EOS = 0  # the end-of-text token of benchmarks/text.py


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder whose head is tied to the embedding."""

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
    """Return the Transformers configuration of ``shape`` for up to ``sequence`` tokens, with caches off."""
    from transformers import LlamaConfig, Qwen2Config

    return {"llama": LlamaConfig, "qwen2": Qwen2Config}[shape.family](
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


def smollm2_like(vocabulary: int, hidden: int, layers: int) -> Shape:
    """Return SmolLM2-135M's shape in another size: head dimension 64, and a third as many key-value heads if divisible."""
    heads = max(1, hidden // 64)
    kv_heads = heads // 3 if heads % 3 == 0 else heads
    mlp = hidden * 8 // 3
    return Shape("llama", hidden, layers, heads, kv_heads, mlp, vocabulary, 100_000.0, initializer_range=1 / 24)


def is_model_type(name: str) -> bool:
    """Return whether ``name`` is a model type of Transformers, and not an existing file or folder."""
    from transformers import CONFIG_MAPPING

    return name in CONFIG_MAPPING and not Path(name).exists()


def config_named(name: str) -> Any:
    """Return the configuration of a known shape, a model type, a folder, a config.json, or a model on the hub."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if name.lower() in SHAPES:
        return config_of(SHAPES[name.lower()])
    if is_model_type(name):
        return CONFIG_MAPPING[name]()
    path, near = Path(name), difflib.get_close_matches(name.lower(), [*CONFIG_MAPPING, *SHAPES], cutoff=0.75)
    forms = f"a folder with a config.json, a name on the Hub, a model type such as llama, or one of {', '.join(SHAPES)}"
    if not path.exists():
        # The hub's client would send several requests for any name; names on the hub have at most one slash.
        if name.startswith((".", "/", "~")) or name.count("/") > 1 or path.suffix == ".json":
            raise ValueError(f"{name}: no such file or folder")
        if "/" not in name and near:
            raise ValueError(f"{name}: unknown model; did you mean {' or '.join(near)}? Pass {forms}")
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # the hub's client raises many kinds of errors
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{name}: this model comes with its own code, which hf-cce does not run; load it in Python and call "
                "apply_cce(model), which warns if a training call computes full logits"
            ) from None
        raise ValueError(f"{name}: no configuration found ({first_line(error)}). Pass {forms}") from None


def auto_class(name: str, config: Any) -> Any:
    """Return the class of Transformers that builds the language model of ``config``."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto
    raise ValueError(f"{name}: {type(config).__name__} is not the configuration of a causal LM or an image-text model")
