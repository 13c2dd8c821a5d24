"""`model_type` "gpt_oss": sliding and full layers in turn, sinks in the softmax, experts with biases.

A sink is one learned number per head, no token: the cache does not know it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from girih.arch import CacheDtypes, _shapes
from girih.arch._attention import alternating_specs, read_heads
from girih.arch._fields import Fields
from girih.kv.spec import KVCacheSpec

DEFAULTS = {
    "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131_072,
    "tie_word_embeddings": False, "attention_bias": True, "sliding_window": 128, "num_local_experts": 128,
}  # fmt: skip


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, as `girih.arch` says."""
    c = Fields(config, DEFAULTS)
    hidden_size, size, heads = c.whole("hidden_size"), c.whole("intermediate_size"), read_heads(c)
    bias, num_experts = c.flag("attention_bias"), c.whole("num_local_experts")

    def _layer(layer: str, _index: int) -> _shapes.Shapes:
        yield from _shapes.norms(layer, _shapes.PRE_NORMS, hidden_size)
        yield from _shapes.attention(layer, hidden_size, heads, bias=bias)
        yield f"{layer}.self_attn.sinks", (heads.num_heads,)
        yield from _shapes.linear(f"{layer}.mlp.router", num_experts, hidden_size, bias=True)
        yield from _shapes.experts(f"{layer}.mlp.experts", num_experts, hidden_size, size, input_first=True)
        yield f"{layer}.mlp.experts.gate_up_proj_bias", (num_experts, 2 * size)
        yield f"{layer}.mlp.experts.down_proj_bias", (num_experts, hidden_size)

    return _shapes.decoder(c, _layer)


def kv_cache_specs(
    config: Mapping[str, Any], dtypes: CacheDtypes, block_size_multiple: int = 16
) -> dict[str, KVCacheSpec]:
    """Return what each layer caches, as `girih.arch` says."""
    return alternating_specs(Fields(config, DEFAULTS), 2, dtypes, block_size_multiple)


def max_model_len(config: Mapping[str, Any]) -> int:
    """Return the model's own length limit in tokens."""
    return Fields(config, DEFAULTS).whole("max_position_embeddings")
