"""Build a tiny model of any class in Transformers' mappings from its own configuration, and a batch for it."""

from typing import Any

import pytest
import torch
import transformers
from models import BATCH, LENGTH, batch, randomise
from tiny_config import TEXT_VOCAB_SIZE, tiny_config
from tiny_options import OPTIONS
from transformers.models.auto import modeling_auto


def _classes(*mappings: str) -> set[str]:
    names = (getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {}) for mapping in mappings)
    return {cls for mapping in names for cls in mapping.values()}


CAUSAL = sorted(_classes("CAUSAL_LM"))
MULTIMODAL = sorted(_classes("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM") - _classes("CAUSAL_LM"))


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, TEXT_VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(3))


def _first_tokens_mask(tokens: int) -> torch.Tensor:
    return (torch.arange(LENGTH).repeat(BATCH, 1) < tokens).long()


_PICTURES = {"pixel_values": _noise(BATCH, 3, 16, 16)}
_ONLY_LABELS = {"input_ids": None, "attention_mask": None}
_QUERIES = {"qformer_input_ids": _ids(BATCH, 4)}

# Arguments of the unpatched class besides input_ids, attention_mask and labels; None: an argument it does not accept.
FORWARD: dict[str, dict[str, Any]] = {
    "Blip2ForConditionalGeneration": _PICTURES,
    "BlipForConditionalGeneration": _PICTURES,
    "BltForCausalLM": {"use_cache": False},  # otherwise its decoder reads its encoder's cache
    "DoryForCausalLM": {"use_cache": False},  # otherwise its second loop reads the first one's cache
    "GitForCausalLM": _PICTURES,
    "IdeficsForVisionText2Text": {
        "pixel_values": _noise(BATCH, 1, 3, 16, 16),
        "image_attention_mask": torch.ones(BATCH, LENGTH, 1, dtype=torch.long),
    },
    "InstructBlipForConditionalGeneration": {**_PICTURES, **_QUERIES},
    "InstructBlipVideoForConditionalGeneration": {"pixel_values": _noise(BATCH, 1, 3, 16, 16), **_QUERIES},
    "Kosmos2ForConditionalGeneration": {**_PICTURES, "image_embeds_position_mask": _first_tokens_mask(4)},
    "KyutaiSpeechToTextForConditionalGeneration": {"input_ids": _ids(BATCH, LENGTH, 3) % 9},  # text and two codebooks
    "Molmo2ForConditionalGeneration": {"mm_token_type_ids": torch.zeros(BATCH, LENGTH, dtype=torch.long)},
    "PPFormulaNetForConditionalGeneration": _PICTURES,
    "Pix2StructForConditionalGeneration": {
        "flattened_patches": _noise(BATCH, 8, 34).abs(),  # row, column, and the patch
        **_ONLY_LABELS,
    },
    "UdopForConditionalGeneration": {"bbox": torch.zeros(BATCH, LENGTH, 4)},
    "VisionEncoderDecoderModel": {**_PICTURES, **_ONLY_LABELS},
    "VoxtralRealtimeForConditionalGeneration": {"input_features": _noise(BATCH, 8, 8 * LENGTH)},
    "xLSTMForCausalLM": {"use_cache": False},  # otherwise its backward fails: the cache is modified in place
}
# Image tokens at the start of each row, for classes that require an image.
IMAGE_TOKENS = {
    "Blip2ForConditionalGeneration": 4,
    "InstructBlipForConditionalGeneration": 4,
    "InstructBlipVideoForConditionalGeneration": 4,
}

# Calls with an image: the number of image tokens at the start of each row, and the matching arguments.
_PATCHES = {
    "pixel_values": _noise(BATCH * 16, 3 * 2 * 4 * 4),
    "image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH),
    "mm_token_type_ids": _first_tokens_mask(4),
}
_PATCHED = """
    CohereCompass Cosmos3Omni Exaone4_5_ Glm46V Glm4v Glm4vMoe Glm5Next GlmOcr HyperCLOVAXVisionV2 Lfm3Vl MiniMaxM3Sparse
    Qwen2VL Qwen2_5OmniThinker Qwen2_5_VL Qwen3OmniMoeThinker Qwen3VL Qwen3VLMoe Qwen3_5 Qwen3_5Moe Qwen4Exp
"""
_SIZED = {**_PICTURES, "image_sizes": torch.tensor([[16, 16]] * BATCH)}
_BY_FAMILY: dict[str, tuple[int, dict[str, Any]]] = {
    **dict.fromkeys(_PATCHED.split(), (4, _PATCHES)),
    **dict.fromkeys(["AyaVision", "Cohere2Vision", "InternVL", "QianfanOCR", "T5Gemma2"], (4, _PICTURES)),
    **dict.fromkeys(["DeepseekVL", "Janus", "Llava", "Ovis2"], (16, _PICTURES)),
    **dict.fromkeys(["Idefics3", "SmolVLM"], (4, {"pixel_values": _PICTURES["pixel_values"][:, None]})),
    **dict.fromkeys(["LightOnOcr", "Mistral3", "MistralLarge4"], (4, _SIZED)),
    "Chameleon": (16, {"pixel_values": _noise(BATCH, 3, 8, 8)}),
    "Gemma3": (4, {**_PICTURES, "token_type_ids": _first_tokens_mask(4)}),
    "PaliGemma": (16, {**_PICTURES, "token_type_ids": _first_tokens_mask(16)}),
    "Step3p7": (1, _PICTURES),
}
PICTURES = {f"{family}ForConditionalGeneration": arguments for family, arguments in _BY_FAMILY.items()}
# Classes that need a package which is not installed where the tests run.
UNBUILT: dict[str, str] = {
    "FastVlmForConditionalGeneration": "timm",
    "InklingForConditionalGeneration": "scipy",
    "PerceptionLMForConditionalGeneration": "timm",
}
# Classes whose training call fails in one release of Transformers.
BROKEN: dict[str, str] = {
    "Llama4ForConditionalGeneration": "'MoeCausalLMOutputWithPast' object has no attribute 'image_outputs'",
}
BROKEN = BROKEN if transformers.__version__ == "5.24.0" else {}


def config(name: str) -> Any:
    settings = tiny_config(getattr(transformers, name).config_class, OPTIONS.get(name))
    vision = getattr(settings, "vision_config", None)
    if getattr(vision, "model_type", "") == "gemma3n_vision":  # its tower comes from timm; attributes are type-checked
        needed = {"rms_norm_eps": 1e-6, "vocab_size": 32, "vocab_offset": 80}
        vars(settings)["vision_config"] = tiny_config(transformers.SiglipVisionConfig, needed)
    return settings


def build(name: str) -> Any:
    settings = config(name)
    torch.manual_seed(0)
    model = randomise(getattr(transformers, name)(settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # an all-zero parameter would hide errors in what precedes it
                parameter.normal_(std=0.1)
    return model.train()


# The Transformers version of these tables. Older ones have fewer classes and other configurations.
MADE_FOR = (5, 24)
OLDER = tuple(map(int, transformers.__version__.split(".")[:2])) < MADE_FOR


def build_or_skip(name: str, with_images: bool = False) -> Any:
    """Run ``build``; with an older Transformers, skip classes that cannot be built or do not run unpatched."""
    if not OLDER:
        return build(name)
    try:
        build(name)(**(pictures if with_images else text)(name)).loss.backward()
        return build(name)
    except Exception as error:  # nothing is patched, so the error is not ours
        pytest.skip(f"{name} of transformers {transformers.__version__} with what is tiny in 5.23: {str(error)[:100]}")


def text(name: str, **options: Any) -> dict[str, Any]:
    """Return a text batch whose ids are neither image tokens nor otherwise special."""
    inputs = {**batch(vocab_size=TEXT_VOCAB_SIZE, **options), **FORWARD.get(name, {})}
    if name in IMAGE_TOKENS:
        inputs["input_ids"][:, : IMAGE_TOKENS[name]] = _image_token_id(name)
    return {key: value for key, value in inputs.items() if value is not None}


def pictures(name: str) -> dict[str, Any]:
    tokens, arguments = PICTURES[name]
    inputs = {**text(name, ignored=False), **arguments}
    inputs["input_ids"][:, :tokens] = _image_token_id(name)
    inputs["labels"][:, :tokens] = -100
    return inputs


def _image_token_id(name: str) -> int:
    settings, kind = config(name), "video" if "Video" in name else "image"
    return int(getattr(settings, f"{kind}_token_id", None) or getattr(settings, f"{kind}_token_index"))


def generate(model: Any, name: str) -> torch.Tensor:
    inputs = {key: value for key, value in text(name, ignored=False).items() if key != "labels"}
    for key, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.shape[1] == LENGTH:
            inputs[key] = value[:, :6]
    if name == "KyutaiSpeechToTextForConditionalGeneration":
        inputs = {"input_values": _noise(BATCH, 1, 4 * model.config.codec_config.frame_size)}
    return model.generate(**inputs, max_new_tokens=4, do_sample=False)


def generates(name: str) -> bool:
    try:
        generate(build(name).eval(), name)
    except Exception:  # an older Transformers has its own bugs
        return False
    return True
