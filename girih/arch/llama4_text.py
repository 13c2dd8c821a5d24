"""`model_type` "llama4_text": chunked local attention, and every fourth layer full and without rotary embedding.

transformers keeps the chunked layers in sliding buffers; a chunk's tokens are never read once the next one has begun.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from girih.arch import CacheDtypes, _shapes
from girih.arch._attention import CHUNKED, FULL, attention_specs, read_heads
from girih.arch._fields import Fields
from girih.errors import ConfigError
from girih.kv.spec import KVCacheSpec

DEFAULTS = {
    "vocab_size": 202_048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131_072, "tie_word_embeddings": False, "attention_bias": False,
    "num_local_experts": 16, "moe_layers": None, "interleave_moe_layer_step": 1, "no_rope_layers": None,
    "no_rope_layer_interval": 4, "attention_chunk_size": 8192,
}  # fmt: skip


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, as `girih.arch` says."""
    c = Fields(config, DEFAULTS)
    hidden_size, size, heads = c.whole("hidden_size"), c.whole("intermediate_size"), read_heads(c)
    bias, num_experts, step = (
        c.flag("attention_bias"),
        c.whole("num_local_experts"),
        c.whole("interleave_moe_layer_step"),
    )
    every = range(step - 1, c.num_layers(), step)
    sparse = every if c.is_null("moe_layers") else c.wholes("moe_layers")

    def _layer(layer: str, index: int) -> _shapes.Shapes:
        yield from _shapes.norms(layer, _shapes.PRE_NORMS, hidden_size)
        yield from _shapes.attention(layer, hidden_size, heads, bias=bias)
        if index in sparse:
            moe = f"{layer}.feed_forward"
            yield from _shapes.experts(f"{moe}.experts", num_experts, hidden_size, size, input_first=True)
            yield from _shapes.linear(f"{moe}.router", num_experts, hidden_size)
            yield from _shapes.gated_mlp(f"{moe}.shared_expert", hidden_size, size)
        else:
            yield from _shapes.gated_mlp(f"{layer}.feed_forward", hidden_size, c.whole("intermediate_size_mlp"))

    return _shapes.decoder(c, _layer)


def kv_cache_specs(
    config: Mapping[str, Any], dtypes: CacheDtypes, block_size_multiple: int = 16
) -> dict[str, KVCacheSpec]:
    """Return what each layer caches, as `girih.arch` says."""
    c = Fields(config, DEFAULTS)
    num_layers, interval, rotary = c.num_layers(), c.whole("no_rope_layer_interval"), c.wholes("no_rope_layers")
    if rotary and len(rotary) != num_layers:
        raise ConfigError(f"config.json: no_rope_layers must have one number for each of the {num_layers} layers")

    def _kind(index: int) -> str:
        return CHUNKED if (rotary[index] if rotary else (index + 1) % interval) else FULL

    kinds = c.per_layer("layer_types", num_layers, (FULL, CHUNKED), _kind)
    chunk = c.whole_or_none("attention_chunk_size")
    return attention_specs(kinds, read_heads(c), dtypes, block_size_multiple, window=chunk)


def max_model_len(config: Mapping[str, Any]) -> int:
    """Return the model's own length limit in tokens."""
    return Fields(config, DEFAULTS).whole("max_position_embeddings")
