"""GGUF architecture "llama": Llama, SmolLM2 and what else shares their layers, as Hugging Face "llama".

GGUF stores the rows of Q and K so that rotary pairs lie side by side (0, half, 1, half + 1, ...); Hugging Face
keeps the two halves apart. Llama 3's rotary scaling is a tensor of factors, `rope_freqs.weight`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from girih.checkpoint.gguf_families._common import WeightRule, base_config, layer_rules, rope_parameters
from girih.checkpoint.gguf_reader import GgufFile
from girih.errors import CheckpointError

ROPE_FACTORS = "rope_freqs.weight"
CONFIG_TENSORS = frozenset({ROPE_FACTORS})

# what the header leaves out, the same for every Llama 3.1 and 3.2
LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_config(gguf: GgufFile) -> dict[str, Any]:
    """Return config.json of a "llama" GGUF.

    Raises:
        CheckpointError: metadata that is missing or that this family cannot express.
    """
    config = base_config(gguf, "LlamaForCausalLM", "llama")
    config["hidden_act"] = "silu"
    config["mlp_bias"] = "blk.0.ffn_up.bias" in gguf.tensors
    rope = rope_parameters(gguf, default_theta=10_000.0)
    if ROPE_FACTORS in gguf.tensors:
        rope = _llama3_rope(gguf, rope["rope_theta"], config["head_dim"])
    return {**config, "rope_parameters": rope}


def weight_rules(gguf: GgufFile, config: dict[str, Any]) -> list[WeightRule]:
    """Return one rule per Hugging Face tensor."""
    orders = {
        "q": unpaired_rows(config["num_attention_heads"], config["head_dim"]),
        "k": unpaired_rows(config["num_key_value_heads"], config["head_dim"]),
    }
    rules = [
        WeightRule("token_embd.weight", "model.embed_tokens.weight"),
        WeightRule("output_norm.weight", "model.norm.weight"),
    ]
    if not config["tie_word_embeddings"]:
        rules.append(WeightRule("output.weight", "lm_head.weight"))
    for layer in range(config["num_hidden_layers"]):
        source, target = f"blk.{layer}.", f"model.layers.{layer}."
        rules += layer_rules(layer, _LAYER_NAMES)
        kinds = ["weight", "bias"] if config["attention_bias"] else ["weight"]
        for kind in kinds:
            rules += [
                WeightRule(f"{source}attn_{x}.{kind}", f"{target}self_attn.{x}_proj.{kind}", row_order=order)
                for x, order in orders.items()
            ]
        if config["attention_bias"]:
            rules.append(WeightRule(f"{source}attn_v.bias", f"{target}self_attn.v_proj.bias"))
            rules.append(WeightRule(f"{source}attn_output.bias", f"{target}self_attn.o_proj.bias"))
        if config["mlp_bias"]:
            rules += [WeightRule(f"{source}ffn_{x}.bias", f"{target}mlp.{x}_proj.bias") for x in ("gate", "up", "down")]
    return rules


def unpaired_rows(num_heads: int, head_dim: int) -> np.ndarray:
    """Return, for each row of a Hugging Face Q or K projection, the GGUF row that holds it.

    In GGUF row 2k + s of a head is what Hugging Face calls row s * head_dim/2 + k.

    Returns:
        int64 [num_heads * head_dim].
    """
    rows = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


def llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """Compute the divisors of the rotary frequencies of Llama 3.1 (arXiv 2407.21783, as released by Meta).

    Short wavelengths stay, long ones are stretched by `factor`, those between are blended.

    Returns:
        float64 [head_dim / 2].
    """
    frequency = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = LLAMA3_SCALING["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = LLAMA3_SCALING["low_freq_factor"], LLAMA3_SCALING["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / (kept + (1 - kept) / factor)


def _llama3_rope(gguf: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Find the scaling factor in the tensor of divisors, and prove that it explains all of them."""
    tensor = gguf.tensors[ROPE_FACTORS]
    factors = tensor.data.reshape(-1).view("<f4") if tensor.type_name == "F32" else np.zeros(0)
    factor = float(np.round(factors.max(initial=1), 3))
    expected = llama3_factors(theta, head_dim, factor)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise CheckpointError(f"{gguf.path}: {ROPE_FACTORS!r} is not Llama 3's rotary scaling; it cannot be imported")
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **LLAMA3_SCALING}
