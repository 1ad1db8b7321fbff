"""What a configuration needs beyond ``tiny_config``'s table of names: sizes that depend on each other, and missing defaults.

One entry a class, on top of the table; a mapping is for the configuration inside of that name, ``...`` keeps a default.
"""

from __future__ import annotations

from typing import Any

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_ZAMBA = {"attention_head_dim": 32, "attention_hidden_size": 64}  # twice the hidden size
OPTIONS: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {"attn_layer_indices": [1], "mamba_d_head": 16, "mamba_n_groups": 1},
    "BltForCausalLM": {
        "encoder_hash_byte_group_vocab": 128,
        "encoder_hash_byte_group_size": [3, 4],
    },
    "CodeGenForCausalLM": {"n_head": 4, "rotary_dim": 4},
    "CohereCompassForCausalLM": {
        "rope_parameters": {
            "full_attention": {**_ROPE, "mrope_section": [4, 2, 2]},
            "sliding_attention": {**_ROPE, "mrope_section": [4, 2, 2]},
        }
    },
    "DbrxForCausalLM": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "Dots1ForCausalLM": {"n_routed_experts": 4, "n_shared_experts": 1},
    "FlintForCausalLM": {"mlp_only_layers": [0]},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["linear_attention", "full_attention"], "mamba_n_groups": 1},
    "HrmTextForCausalLM": {"num_layers_per_stack": None, "num_hidden_layers": 1},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Mamba2ForCausalLM": {"num_heads": 4, "n_groups": 1},
    "MiMoV2FlashForCausalLM": {"num_attention_heads": 4, "head_dim": 8, "v_head_dim": 8},
    "NemotronHForCausalLM": {"n_groups": 1, "layers_block_type": ...},
    "Qwen4ExpForCausalLM": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
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
    "xLSTMForCausalLM": {"chunk_size": 8, "qk_dim_factor": 1.0},
}
