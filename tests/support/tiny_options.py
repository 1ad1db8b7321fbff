"""Configuration values that ``tiny_config``'s table of names lacks: sizes that depend on each other, and missing defaults.

One entry per class, on top of the table; a mapping applies to the nested configuration of that name, ``...`` keeps a default.
"""

from typing import Any

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_SECTIONS = {**_ROPE, "mrope_section": [4, 2, 2]}  # for half of a head of 16
_HALF_SECTIONS = {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
_PICTURE_WORDS = {"<image>": 97, **{f"IMGIMG{letter}Z": 85 + i for i, letter in enumerate("ABCDEFGH")}}
_VQ = {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "resolution": 16, "num_embeddings": 8}
_SLIDING_SECTIONS = {"full_attention": _SECTIONS, "sliding_attention": _SECTIONS}
_INDEXER = {"n_heads": 2, "kv_heads": 1, "head_dim": 16, "budget": 8, "compress_ratio": 2}
_INDEXER = {f"indexer_{name}": size for name, size in _INDEXER.items()}
_ZAMBA = {"attention_head_dim": 32, "attention_hidden_size": 64}  # twice the hidden size
_SECTIONED = """
    Glm46VForConditionalGeneration Glm4vForConditionalGeneration GlmOcrForConditionalGeneration
    PaddleOCRVLForConditionalGeneration Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration
"""
_THINKERS = ("Qwen2_5OmniThinkerForConditionalGeneration", "Qwen3OmniMoeThinkerForConditionalGeneration")
_TEXT_SECTIONS = {"text_config": {"rope_parameters": _SECTIONS}}
OPTIONS: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "BltForCausalLM": {"encoder_hash_byte_group_vocab": 99},
    "CodeGenForCausalLM": {"n_head": 4, "rotary_dim": 4},  # for transformers 5.0
    "CohereCompassForCausalLM": {"rope_parameters": _SLIDING_SECTIONS},
    "DbrxForCausalLM": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "DogeForCausalLM": {"is_moe": True},
    "Dots1ForCausalLM": {"n_routed_experts": 4, "n_shared_experts": 1},
    "Dots3NoteForCausalLM": {"layer_types": ["indexed_attention"] * 2},  # the other types have sizes of their own
    "Ernie4_5_MoeForCausalLM": {"use_bias": True},  # also for the head
    "FlintForCausalLM": {"mlp_only_layers": [0]},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["linear_attention", "full_attention"]},
    "HrmTextForCausalLM": {"num_layers_per_stack": None, "num_hidden_layers": 1},
    "JambaForCausalLM": {"attn_layer_offset": 1},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Mamba2ForCausalLM": {"num_heads": 4, "n_groups": 1},
    "MiMoV2FlashForCausalLM": {"num_attention_heads": 4, "head_dim": 8, "v_head_dim": 8},
    "NemotronHForCausalLM": {"n_groups": 1, "layers_block_type": ...},
    "Qwen4ExpForCausalLM": _INDEXER,
    "ReformerModelWithLMHead": {
        "is_decoder": True,
        "axial_pos_shape": [4, 6],  # a training call has 24 tokens
        "axial_pos_embds_dim": [8, 24],
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "XmodForCausalLM": {"default_language": "en_XX", "is_decoder": True},
    "ZambaForCausalLM": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, **_ZAMBA},
    "Zamba2ForCausalLM": {"layers_block_type": ["linear_attention", "hybrid"], **_ZAMBA},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    # its cache works in multiples of 64
    "xLSTMForCausalLM": {"chunk_size": 8, "hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0},
    "Inkling2ForCausalLM": {"unpadded_vocab_size": 99},
    "Inkling2LoopForCausalLM": {"unpadded_vocab_size": 99},
    # with images
    **dict.fromkeys(_SECTIONED.split(), _TEXT_SECTIONS),
    **{name: {"vision_start_token_id": 98, **_TEXT_SECTIONS} for name in _THINKERS},
    "Inkling2ForConditionalGeneration": {"text_config": {"unpadded_vocab_size": 99}},
    "Inkling2LoopForConditionalGeneration": {"text_config": {"unpadded_vocab_size": 99}},
    "Apertus1p5ForConditionalGeneration": {
        "audio_config": {"codebook_dim": 32, "codebook_size": 4},
        "vision_config": {"codebook_size": 4},
        "image_token_offset": 86,
        "audio_token_offset": 90,
    },
    "Blip2ForConditionalGeneration": {"image_token_index": 85},
    "ChameleonForConditionalGeneration": {"vocabulary_map": _PICTURE_WORDS, "vq_config": _VQ},
    "CohereCompassForConditionalGeneration": {"text_config": {"rope_parameters": _SLIDING_SECTIONS}},
    "DeepseekOcr2ForConditionalGeneration": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    "Dots3NoteForConditionalGeneration": {
        "audio_config": {"adapter_input_size": 32},
        "text_config": {"layer_types": ["indexed_attention"] * 2},  # the other types have sizes of their own
    },
    "Emu3ForConditionalGeneration": {"vocabulary_map": _PICTURE_WORDS, "vq_config": _VQ},
    "Ernie4_5_VLMoeForConditionalGeneration": {
        "text_config": {"rope_parameters": {**_ROPE, "mrope_section": [2, 2, 4]}}
    },
    "Florence2ForConditionalGeneration": {"vision_config": {"embed_dim": [8, 16, 32, 32], "depths": [1, 1, 1, 1]}},
    "FunAsrNanoForConditionalGeneration": {"adaptor_config": {"intermediate_size": 8}},
    "Glm4vMoeForConditionalGeneration": {"text_config": {"rope_parameters": _HALF_SECTIONS}},
    "Glm5NextForConditionalGeneration": {
        "text_config": {"index_kpool": 4, "qk_rope_head_dim": 0, "qk_head_dim": 8, "head_dim": 8}
    },
    "Granite4VisionForConditionalGeneration": {
        "deepstack_layer_map": [[-1, 0]],
        "vision_config": {"hidden_size": 64},  # one head of its Q-Former has 64
        "spatial_target_layers": [0, 0, 1, 1],
        "downsample_rate": "1/2",
    },
    "HunYuanVLForConditionalGeneration": {
        "text_config": {"rope_parameters": {**_ROPE, "xdrope_section": [2, 2, 2, 2]}}
    },
    "InstructBlipForConditionalGeneration": {"image_token_index": 85},
    "InstructBlipVideoForConditionalGeneration": {"video_token_index": 85},
    "JanusForConditionalGeneration": {"vq_config": {"channel_multiplier": [1, 1], "num_res_blocks": 1}},
    "KyutaiSpeechToTextForConditionalGeneration": {
        "audio_bos_token_id": 8,
        "codec_config": {"codebook_size": 8, "num_quantizers": 2},
    },
    "Mistral4ForCausalLM": {"head_dim": 16},
    "Molmo2ForConditionalGeneration": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "MuseSparkForConditionalGeneration": {
        "audio_config": {"num_hidden_layers": 4, "hidden_sizes": [8, 8, 16, 32], "depths": [1, 1, 1, 1]}
    },
    "Nemotron3_5TranscribeForConditionalGeneration": {"text_config": {"n_groups": 1, "layers_block_type": ...}},
    "NemotronH_Omni_Reasoning_V3": {
        "vision_config": {"video_temporal_patch_size": 2},
        "text_config": {"n_groups": 1, "layers_block_type": ...},
    },
    "Qwen4ExpForConditionalGeneration": {"text_config": _INDEXER},
    "Step3p7ForConditionalGeneration": {"text_config": {"sliding_window": 16}},
    "UdopForConditionalGeneration": {"decoder_start_token_id": 1},
    "VisionEncoderDecoderModel": {"pad_token_id": 0, "decoder_start_token_id": 1},
}
