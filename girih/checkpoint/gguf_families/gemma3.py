"""GGUF architecture "gemma3": the text part of Gemma 3, as Hugging Face "gemma3_text".

GGUF stores norm weights plus one, since its runtimes multiply by the weight and Gemma multiplies by 1 + weight.
The header leaves out which layers slide, the rotary base of those layers, and how the 27B model scales queries.
"""

from __future__ import annotations

from typing import Any

from girih.checkpoint.gguf_families._common import WeightRule, base_config, layer_rules, rope_parameters
from girih.checkpoint.gguf_reader import GgufFile

CONFIG_TENSORS: frozenset[str] = frozenset()

# every sixth layer sees the whole context, the five before it a window
FULL_ATTENTION_EVERY = 6
LOCAL_ROPE_THETA = 10_000.0
# Gemma 3 27B, known by its depth, scales by hidden size / heads instead of the head's size (Gemma 3 report, section 2)
NUM_LAYERS_27B = 62

_MATRIX_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORM_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def hf_config(gguf: GgufFile) -> dict[str, Any]:
    """Return config.json of a "gemma3" GGUF.

    Raises:
        CheckpointError: metadata that is missing or that this family cannot express.
    """
    config = base_config(gguf, "Gemma3ForCausalLM", "gemma3_text")
    num_layers = config["num_hidden_layers"]
    scale_by = config["head_dim"]
    if num_layers == NUM_LAYERS_27B:
        scale_by = config["hidden_size"] // config["num_attention_heads"]
    return {
        **config,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scale_by,
        "sliding_window": gguf.integer("gemma3.attention.sliding_window"),
        "layer_types": [
            "full_attention" if (i + 1) % FULL_ATTENTION_EVERY == 0 else "sliding_attention" for i in range(num_layers)
        ],
        "rope_parameters": {
            "full_attention": rope_parameters(gguf, default_theta=1_000_000.0),
            "sliding_attention": {"rope_type": "default", "rope_theta": LOCAL_ROPE_THETA},
        },
    }


def weight_rules(gguf: GgufFile, config: dict[str, Any]) -> list[WeightRule]:
    """Return one rule per Hugging Face tensor."""
    rules = [
        WeightRule("token_embd.weight", "model.embed_tokens.weight"),
        WeightRule("output_norm.weight", "model.norm.weight", offset=-1.0),
    ]
    if not config["tie_word_embeddings"]:
        rules.append(WeightRule("output.weight", "lm_head.weight"))
    for layer in range(config["num_hidden_layers"]):
        rules += layer_rules(layer, _MATRIX_NAMES)
        rules += [WeightRule(rule.source, rule.target, offset=-1.0) for rule in layer_rules(layer, _NORM_NAMES)]
    return rules
