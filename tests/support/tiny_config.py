"""Tiny configurations: any Transformers configuration class with all known sizes reduced and no knob at its default.

Names mean the same in every family (``hidden_size``, ``num_experts`` …), so one table of names shrinks them all, including
nested vision, audio and text configurations. Settings between LM head and loss (scale, softcap, router and z-loss coefficients,
vocabulary slice) are moved away from their defaults, so that nothing agrees by accident.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

VOCAB_SIZE = 99
HIDDEN = 32
TEXT_VOCAB_SIZE = 80  # ids from here on are image, audio or other special tokens
_HEADS = 2
_LAYERS = 2

_WIDTHS = """
    hidden_size d_model n_embd embed_dim dim_model embedding_size input_embedding_size output_embedding_size out_hidden_size
    output_dim projection_dim text_hidden_size vision_hidden_size image_text_hidden_size encoder_hidden_size decoder_hidden_size
    projector_hidden_size projector_input_dim projector_output_dim projection_hidden_size projection_hidden_dim merged_hidden_size
    lru_width word_embed_proj_dim emb_dim embedding_dim mlp_dim vision_output_dim moe_hidden_size hidden_size_per_layer_input
    backbone_hidden_size attention_hidden_size patch_embed_hidden_size image_token_embed_dim adapter_out_dim hidden_size_global
    position_embedding_size router_hidden_size adapter_in_dim shape_embed_dim pronunciation_embed_dim ple_embed_dim
    audio_hidden_size
"""
_INNER = """
    intermediate_size intermediate_size_mlp ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size d_ff dff dim_ff d_inner
    moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size shared_intermediate_size
    feed_forward_size expert_ffn_hidden_size dense_intermediate_size share_expert_dim projection_intermediate_size
    alignment_intermediate_size moe_shared_expert_intermediate_size mamba_d_ssm projector_intermediate_size
"""
_LAYER_COUNTS = """
    num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers num_encoder_layers depth layers
    num_global_layers conf_num_hidden_layers num_layers_per_stack num_res_blocks
"""
_HEAD_COUNTS = """
    num_attention_heads num_key_value_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
    attention_heads num_kv_heads num_encoder_attention_heads num_decoder_attention_heads linear_num_heads linear_num_key_heads
    linear_num_value_heads index_n_heads num_query_groups swa_num_attention_heads swa_num_key_value_heads resampler_n_heads
    conf_num_attention_heads num_sliding_attention_heads resampler_heads n_mamba_heads
"""
_HEAD_WIDTHS = """
    head_dim kv_channels attention_head_dim d_kv dim_head d_head linear_head_dim linear_key_head_dim linear_value_head_dim
    swa_head_dim attention_head_size mamba_d_head mamba_head_dim index_head_dim global_head_dim resampler_head_dim
    resampler_dim_head
"""
_EXPERTS = "num_experts num_local_experts n_routed_experts moe_num_experts"
_PER_TOKEN = "num_experts_per_tok num_experts_per_token moe_top_k moe_k moe_topk"
_ONES = """
    n_group topk_group num_expert_group first_k_dense_replace n_shared_experts num_shared_experts moe_num_shared_experts
    num_dense_layers
"""
_POSITIONS = (
    "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length seq_len max_target_positions"
)

_OTHER_SIZES = {
    0: "num_kv_shared_layers num_nextn_predict_layers",
    2: "o_groups num_codebooks",
    3: "num_channels",
    4: """
        patch_size mamba_n_heads mamba_num_heads mamba_dt_rank time_step_rank num_query_tokens latent_query_num
        num_filters mm_tokens_per_image
    """,
    8: """
        qk_nope_head_dim qk_rope_head_dim index_topk rotary_dim state_size ssm_state_size mamba_d_state
        mamba_chunk_size chunk_size hc_lowrank num_mel_bins laurel_rank
    """,
    9: "codebook_vocab_size",
    16: """
        image_size q_lora_rank kv_lora_rank o_lora_rank qk_head_dim v_head_dim sliding_window
        sliding_window_size attention_chunk_size downsample_hidden_size max_image_size max_img_size
        num_position_embeddings max_source_positions
    """,
    32: "base_channels upsample_groups",
    VOCAB_SIZE: "vocab_size decoder_vocab_size vocab_size_per_layer_input",
}
_SIZES: dict[str, Any] = {
    **dict.fromkeys(_WIDTHS.split(), HIDDEN),
    **dict.fromkeys(_INNER.split(), 64),
    **dict.fromkeys(_LAYER_COUNTS.split(), _LAYERS),
    **dict.fromkeys(_HEAD_COUNTS.split(), _HEADS),
    **dict.fromkeys(_HEAD_WIDTHS.split(), HIDDEN // _HEADS),
    **dict.fromkeys(_EXPERTS.split(), 4),
    **dict.fromkeys(_PER_TOKEN.split(), 2),
    **dict.fromkeys(_ONES.split(), 1),
    **dict.fromkeys(_POSITIONS.split(), 64),
    **{name: size for size, names in _OTHER_SIZES.items() for name in names.split()},
}
_NEEDED = {"head_dim", "num_key_value_heads", *_PER_TOKEN.split()}  # some classes fail on a default of None
KNOBS: dict[str, Any] = {
    "final_logit_softcapping": 5.0,
    "logits_soft_cap": 5.0,
    "output_logit_soft_cap": 5.0,
    "logit_scale": 0.3,
    "logits_scaling": 3.0,
    "lm_head_multiplier": 0.4,
    "output_multiplier": 0.4,
    "logits_mup_width_multiplier": 2.0,
    "dim_model_base": 8,
    "z_loss_coefficient": 0.1,
    "unpadded_vocab_size": 90,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
    "aux_loss_coef": 0.5,
    "moe_loss_weight": 0.5,
    "label_smoothing": 0.1,
    "lm_head_bias": True,
}
_AT_REST = re.compile(r"(dropout|_pdrop$|drop_path|layerdrop|jitter_noise|_dropout_prob$|mask_time_prob)")
_SPECIAL = re.compile(r"_(id|index)$")
_GIVEN = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_PER_LAYER = re.compile(
    r"(layer_types|layers_block_type|_per_layer|no_rope_layers|layer_rope_theta|block_types|indexer_types)$"
)


def tiny_config(config_class: Any, options: Mapping[str, Any] | None = None) -> Any:
    """Return a configuration of ``config_class`` for a model of about ten thousand parameters.

    ``options`` take precedence. A mapping applies to the nested configuration of that name; ``...`` keeps a default.
    """
    special_ids = itertools.cycle(range(TEXT_VOCAB_SIZE, VOCAB_SIZE))
    return _shrink(config_class, config_class(), dict(options or {}), special_ids)


def _shrink(config_class: Any, usual: Any, options: dict[str, Any], special: Iterator[int]) -> Any:
    from transformers import PreTrainedConfig

    tiny: dict[str, Any] = {}
    for name, value in vars(usual).items():
        given = options.get(name)
        if isinstance(value, PreTrainedConfig) and (given is None or isinstance(given, Mapping)):
            tiny[name] = _shrink(type(value), value, dict(options.pop(name, {})), special)
        elif name not in options and (replacement := _small(name, value, special)) is not None:
            tiny[name] = replacement
    if "kv_lora_rank" in tiny and "head_dim" in tiny:
        tiny["head_dim"] = _SIZES["qk_rope_head_dim"]  # latent attention rotates only these dimensions
    tiny |= {name: value for name, value in options.items() if value is not ...}
    depth = next((tiny[name] for name in _DEPTHS if name in tiny), None)
    for name, value in vars(usual).items():
        if name in options:
            continue
        if depth is not None and _PER_LAYER.search(name) and isinstance(value, (list, tuple)) and len(value) > depth:
            tiny[name] = type(value)(_few(list(value), depth))
        if isinstance(value, dict) and "mrope_section" in value:
            half = int(tiny.get("head_dim", HIDDEN // _HEADS) * (value.get("partial_rotary_factor") or 1.0)) // 2
            tiny[name] = {**value, "mrope_section": [half - 2 * (half // 4), half // 4, half // 4]}
    return config_class(**tiny)


def _small(name: str, value: Any, special: Iterator[int]) -> Any:
    """Return the value for an attribute of this name; None leaves it unchanged."""
    if name in _GIVEN:
        return _GIVEN[name]
    if name in KNOBS:
        return KNOBS[name]
    if _AT_REST.search(name) and isinstance(value, (int, float)) and not isinstance(value, bool):
        return type(value)(0)
    if name in _SIZES and isinstance(value, int) and not isinstance(value, bool):
        return _SIZES[name]
    if name in ("image_size", "patch_size") and isinstance(value, (list, tuple)):
        return type(value)([_SIZES[name]] * len(value))
    if name in _NEEDED and value is None:
        return _SIZES[name]
    if _SPECIAL.search(name) and "token" in name and isinstance(value, int):
        return next(special)
    return None


def _few(values: list[Any], count: int) -> list[Any]:
    """Return ``count`` entries of a per-layer list, covering as many kinds as fit, in order of first appearance."""
    kinds: list[Any] = []
    for value in values:
        if value not in kinds:
            kinds.append(value)
    return (kinds + values)[:count] if len(kinds) <= count else kinds[:count]
