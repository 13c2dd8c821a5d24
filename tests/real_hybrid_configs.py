"""config.json of well-known models with recurrent layers or an encoder, and how many parameters they have.

Only the fields that decide sizes and caches are kept. The numbers are those of the models' cards and safetensors
headers; None where only transformers' own model was counted. Layers for multi-token prediction are left out.
"""

QWEN3_NEXT_80B = {
    "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120,
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "max_position_embeddings": 262144, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "num_experts": 512, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "mlp_only_layers": [], "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
GRANITE_4_H_TINY = {
    "model_type": "granitemoehybrid", "vocab_size": 100352, "hidden_size": 1536, "intermediate_size": 512,
    "num_hidden_layers": 40, "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)],
    "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 131072, "mamba_n_heads": 48,
    "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2,
    "num_local_experts": 64, "shared_intermediate_size": 1024, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
JAMBA_01 = {
    "model_type": "jamba", "vocab_size": 65536, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 262144,
    "attn_layer_period": 8, "attn_layer_offset": 4, "expert_layer_period": 2, "expert_layer_offset": 1,
    "num_experts": 16, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 256,
    "torch_dtype": "bfloat16",
}  # fmt: skip
BAMBA_9B = {
    "model_type": "bamba", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "attn_layer_indices": [9, 18, 27], "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 262144, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128,
    "mamba_n_groups": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
NEMOTRON_H_8B = {
    "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504,
    "num_hidden_layers": 52, "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192,
    "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "torch_dtype": "bfloat16",
}  # fmt: skip
FALCON_H1_05B = {
    "model_type": "falcon_h1", "vocab_size": 32784, "hidden_size": 1024, "intermediate_size": 2048,
    "num_hidden_layers": 36, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 16384, "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64,
    "mamba_d_state": 128, "mamba_n_groups": 1, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
LFM2_350M = {
    "model_type": "lfm2", "vocab_size": 65536, "hidden_size": 1024, "block_ff_dim": 6656, "num_hidden_layers": 16,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14], "num_attention_heads": 16, "num_key_value_heads": 8,
    "max_position_embeddings": 128000, "conv_L_cache": 3, "block_multiple_of": 256, "tie_embedding": True,
    "torch_dtype": "bfloat16",
}  # fmt: skip
MINIMAX_TEXT_01 = {
    "model_type": "minimax", "vocab_size": 200064, "hidden_size": 6144, "intermediate_size": 9216,
    "num_hidden_layers": 80, "layer_types": (["linear_attention"] * 7 + ["full_attention"]) * 10,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 32,
    "max_position_embeddings": 10240000, "sliding_window": None, "torch_dtype": "bfloat16",
}  # fmt: skip
WHISPER_LARGE_V3 = {
    "model_type": "whisper", "vocab_size": 51866, "num_mel_bins": 128, "d_model": 1280, "encoder_layers": 32,
    "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_layers": 32, "decoder_attention_heads": 20,
    "decoder_ffn_dim": 5120, "max_source_positions": 1500, "max_target_positions": 448, "torch_dtype": "float16",
}  # fmt: skip

HYBRIDS = (
    (QWEN3_NEXT_80B, 79_674_391_296),
    (GRANITE_4_H_TINY, 6_939_037_248),
    (JAMBA_01, 51_570_323_328),
    (BAMBA_9B, None),
    (NEMOTRON_H_8B, None),
    (FALCON_H1_05B, 521_411_104),
    (LFM2_350M, 354_483_968),
    (MINIMAX_TEXT_01, 456_089_655_296),
    (WHISPER_LARGE_V3, 1_543_490_560),
)
