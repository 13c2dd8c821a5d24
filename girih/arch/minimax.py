"""`model_type` "minimax": lightning attention, a state of head_dim x head_dim per head, beside full attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from girih.arch import CacheDtypes, _shapes
from girih.arch._attention import FULL, SLIDING, attention_spec, read_heads
from girih.arch._fields import Fields
from girih.arch._state import LINEAR, hybrid_kinds, hybrid_specs
from girih.kv.spec import KVCacheSpec
from girih.kv.specs.state import StateSpec

DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": None, "max_position_embeddings": 131_072,
    "tie_word_embeddings": False, "sliding_window": None, "num_local_experts": 8, "layer_types": None,
}  # fmt: skip


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, as `girih.arch` says."""
    c = Fields(config, DEFAULTS)
    hidden_size, intermediate_size, heads = c.whole("hidden_size"), c.whole("intermediate_size"), read_heads(c)
    kinds, num_experts = _layer_types(c), c.whole("num_local_experts")

    def _layer(layer: str, index: int) -> _shapes.Shapes:
        yield from _shapes.norms(layer, _shapes.PRE_NORMS, hidden_size)
        if kinds[index] == FULL:
            yield from _shapes.attention(layer, hidden_size, heads)
        else:
            module, width = f"{layer}.self_attn", heads.num_heads * heads.head_dim
            yield from _shapes.norms(module, ("norm",), width)
            yield from _shapes.linear(f"{module}.qkv_proj", 3 * width, hidden_size)
            yield from _shapes.linear(f"{module}.out_proj", hidden_size, width)
            yield from _shapes.linear(f"{module}.output_gate", width, hidden_size)
        yield f"{layer}.mlp.gate.weight", (num_experts, hidden_size)
        yield from _shapes.experts(f"{layer}.mlp.experts", num_experts, hidden_size, intermediate_size)

    return _shapes.decoder(c, _layer)


def kv_cache_specs(
    config: Mapping[str, Any], dtypes: CacheDtypes, block_size_multiple: int = 16
) -> dict[str, KVCacheSpec]:
    """Return what each layer caches, as `girih.arch` says; a "sliding_window" holds for attention layers."""
    c = Fields(config, DEFAULTS)
    heads, window = read_heads(c), c.whole_or_none("sliding_window")
    state = StateSpec(
        shapes=((heads.num_heads, heads.head_dim, heads.head_dim),),
        dtypes=(dtypes.state,),
        block_size_multiple=block_size_multiple,
    )
    attention = attention_spec(SLIDING, heads, dtypes, block_size_multiple, window=window)
    return hybrid_specs(_layer_types(c), attention, state, "self_attn")


def max_model_len(config: Mapping[str, Any]) -> int:
    """Return the model's own length limit in tokens."""
    return Fields(config, DEFAULTS).whole("max_position_embeddings")


def _layer_types(c: Fields) -> tuple[str, ...]:
    """Return the kind of each layer; where config.json has no list, every second has a state."""
    return hybrid_kinds(c, "layer_types", lambda index: LINEAR if index % 2 else FULL)
