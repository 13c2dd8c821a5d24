"""config.json of well-known models, with the number of parameters that their model cards and safetensors headers give.

Only the fields that decide sizes and caches are kept; they are written as their authors wrote them, in old and new
formats. Where a model has a tower for images, or layers for multi-token prediction, the number is without them.
"""

LLAMA_3_1_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_3_1_70B = LLAMA_3_1_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip
LLAMA_3_2_1B = LLAMA_3_1_8B | {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
MISTRAL_7B_01 = {
    "model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768,
    "sliding_window": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN_2_5_7B = {
    "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 131072,
    "max_window_layers": 28, "sliding_window": 131072, "use_sliding_window": False, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN_3_8B = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 40960,
    "max_window_layers": 36, "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN_3_0_6B = QWEN_3_8B | {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "max_window_layers": 28, "tie_word_embeddings": True,
}  # fmt: skip
QWEN_3_30B_A3B = QWEN_3_8B | {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "max_window_layers": 48, "num_experts": 128,
    "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
GEMMA_2_9B = {
    "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 3584, "intermediate_size": 14336, "head_dim": 256,
    "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "sliding_window": 4096, "torch_dtype": "float32",
}  # fmt: skip
GEMMA_3_1B = {
    "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912,
    "head_dim": 256, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
    "max_position_embeddings": 32768, "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA_3_27B = {
    "model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"model_type": "siglip_vision_model"},
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "head_dim": 128,
        "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16, "sliding_window": 1024,
        "query_pre_attn_scalar": 168, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
}  # fmt: skip
GEMMA_3N_E4B = {
    "model_type": "gemma3n", "torch_dtype": "bfloat16", "vision_config": {}, "audio_config": {},
    "text_config": {
        "model_type": "gemma3n_text", "vocab_size": 262400, "hidden_size": 2048, "intermediate_size": [16384] * 35,
        "head_dim": 256, "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 2,
        "num_kv_shared_layers": 15, "max_position_embeddings": 32768, "sliding_window": 512, "altup_num_inputs": 4,
        "laurel_rank": 64, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    },
}  # fmt: skip
GPT_OSS_20B = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32,
    "max_position_embeddings": 131072, "sliding_window": 128, "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
GPT_OSS_120B = GPT_OSS_20B | {
    "num_hidden_layers": 36, "num_local_experts": 128, "layer_types": ["sliding_attention", "full_attention"] * 18,
}  # fmt: skip
LLAMA_4_SCOUT = {
    "model_type": "llama4", "torch_dtype": "bfloat16", "vision_config": {"model_type": "llama4_vision_model"},
    "text_config": {
        "model_type": "llama4_text", "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192,
        "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8,
        "head_dim": 128, "num_local_experts": 16, "interleave_moe_layer_step": 1, "attention_chunk_size": 8192,
        "no_rope_layers": [], "max_position_embeddings": 10485760,
    },
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_nextn_predict_layers": 1,
    "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "first_k_dense_replace": 3, "max_position_embeddings": 163840, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
