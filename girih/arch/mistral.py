"""`model_type` "mistral": one window in every layer; none where "sliding_window" is null, as from Mistral 7B 0.2 on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from girih.arch import CacheDtypes, _shapes
from girih.arch._attention import SLIDING, attention_specs, read_heads
from girih.arch._fields import Fields
from girih.kv.spec import KVCacheSpec

DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": None, "max_position_embeddings": 131_072,
    "tie_word_embeddings": False, "sliding_window": 4096,
}  # fmt: skip


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, as `girih.arch` says."""
    c = Fields(config, DEFAULTS)
    hidden_size, intermediate_size, heads = c.whole("hidden_size"), c.whole("intermediate_size"), read_heads(c)

    def _layer(layer: str, _index: int) -> _shapes.Shapes:
        yield from _shapes.norms(layer, _shapes.PRE_NORMS, hidden_size)
        yield from _shapes.attention(layer, hidden_size, heads)
        yield from _shapes.gated_mlp(f"{layer}.mlp", hidden_size, intermediate_size)

    return _shapes.decoder(c, _layer)


def kv_cache_specs(
    config: Mapping[str, Any], dtypes: CacheDtypes, block_size_multiple: int = 16
) -> dict[str, KVCacheSpec]:
    """Return what each layer caches, as `girih.arch` says."""
    c = Fields(config, DEFAULTS)
    kinds, window = [SLIDING] * c.num_layers(), c.whole_or_none("sliding_window")
    return attention_specs(kinds, read_heads(c), dtypes, block_size_multiple, window=window)


def max_model_len(config: Mapping[str, Any]) -> int:
    """Return the model's own length limit in tokens."""
    return Fields(config, DEFAULTS).whole("max_position_embeddings")
