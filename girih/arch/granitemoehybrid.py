"""`model_type` "granitemoehybrid" (Granite 4.0): Mamba 2 and full attention; experts, if any, beside a shared MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from girih.arch import CacheDtypes, _shapes
from girih.arch._attention import FULL, attention_spec, read_heads
from girih.arch._fields import Fields
from girih.arch._state import LINEAR, MAMBA2_DEFAULTS, hybrid_kinds, hybrid_specs, read_fields, read_mamba2
from girih.kv.spec import KVCacheSpec

DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, "attention_bias": False, "num_local_experts": 8, "shared_intermediate_size": 1024,
    "layer_types": None, **MAMBA2_DEFAULTS,
}  # fmt: skip


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, as `girih.arch` says."""
    c = read_fields(config, DEFAULTS)
    hidden_size, num_experts = c.whole("hidden_size"), c.whole("num_local_experts", at_least=0)
    shared_size, heads = c.whole("shared_intermediate_size"), read_heads(c)
    mamba, kinds = read_mamba2(c), _layer_types(c)

    def _layer(layer: str, index: int) -> _shapes.Shapes:
        yield from _shapes.norms(layer, _shapes.PRE_NORMS, hidden_size)
        if kinds[index] == FULL:
            yield from _shapes.attention(layer, hidden_size, heads, bias=c.flag("attention_bias"))
        else:
            yield from mamba.weight_shapes(f"{layer}.mamba", hidden_size)
        if num_experts:
            module = f"{layer}.block_sparse_moe"
            yield f"{module}.router.weight", (num_experts, hidden_size)
            yield from _shapes.experts(f"{module}.experts", num_experts, hidden_size, c.whole("intermediate_size"))
        yield from _shapes.linear(f"{layer}.shared_mlp.input_linear", 2 * shared_size, hidden_size)
        yield from _shapes.linear(f"{layer}.shared_mlp.output_linear", hidden_size, shared_size)

    return _shapes.decoder(c, _layer)


def kv_cache_specs(
    config: Mapping[str, Any], dtypes: CacheDtypes, block_size_multiple: int = 16
) -> dict[str, KVCacheSpec]:
    """Return what each layer caches, as `girih.arch` says."""
    c = read_fields(config, DEFAULTS)
    attention = attention_spec(FULL, read_heads(c), dtypes, block_size_multiple)
    return hybrid_specs(_layer_types(c), attention, read_mamba2(c).state_spec(dtypes, block_size_multiple), "mamba")


def max_model_len(config: Mapping[str, Any]) -> int:
    """Return the model's own length limit in tokens."""
    return read_fields(config, DEFAULTS).whole("max_position_embeddings")


def _layer_types(c: Fields) -> tuple[str, ...]:
    """Return the kind of each layer, from the field of today or its older name; without either, all have a state."""
    name = "layers_block_type" if c.is_null("layer_types") else "layer_types"
    return hybrid_kinds(c, name, lambda _index: LINEAR)
