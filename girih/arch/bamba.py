"""`model_type` "bamba": Mamba 2, and full attention in the layers that "attn_layer_indices" lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from girih.arch import CacheDtypes, _shapes
from girih.arch._attention import FULL, attention_spec, read_heads
from girih.arch._fields import Fields
from girih.arch._state import LINEAR, MAMBA2_DEFAULTS, hybrid_specs, read_fields, read_mamba2, rename
from girih.kv.spec import KVCacheSpec

DEFAULTS = {
    "vocab_size": 128_000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 262_144,
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "attn_layer_indices": None,
    **MAMBA2_DEFAULTS,
}  # fmt: skip


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, as `girih.arch` says."""
    c = read_fields(config, DEFAULTS)
    hidden_size, intermediate_size = c.whole("hidden_size"), c.whole("intermediate_size")
    heads, mamba, kinds = read_heads(c), read_mamba2(c), _layer_types(c)

    def _layer(layer: str, index: int) -> _shapes.Shapes:
        yield from _shapes.norms(layer, ("input_layernorm", "pre_ff_layernorm"), hidden_size)
        if kinds[index] == FULL:
            yield from _shapes.attention(layer, hidden_size, heads, bias=c.flag("attention_bias"))
        else:
            yield from mamba.weight_shapes(f"{layer}.mamba", hidden_size)
        bias_of_mlp = c.flag("mlp_bias")
        yield from _shapes.gated_mlp(f"{layer}.feed_forward", hidden_size, intermediate_size, bias=bias_of_mlp)

    return rename(_shapes.decoder(c, _layer), "model.norm.", "model.final_layernorm.")


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
    attention_layers = c.wholes("attn_layer_indices")
    return tuple(FULL if index in attention_layers else LINEAR for index in range(c.num_layers()))
