"""`model_type` "qwen2": full attention, or with "use_sliding_window" a window from layer "max_window_layers" on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from girih.arch import CacheDtypes, _shapes
from girih.arch._attention import FULL, SLIDING, attention_specs, read_heads
from girih.arch._fields import Fields
from girih.kv.spec import KVCacheSpec

DEFAULTS = {
    "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": None, "max_position_embeddings": 32768,
    "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, as `girih.arch` says."""
    c = Fields(config, DEFAULTS)
    hidden_size, intermediate_size, heads = c.whole("hidden_size"), c.whole("intermediate_size"), read_heads(c)

    def _layer(layer: str, _index: int) -> _shapes.Shapes:
        yield from _shapes.norms(layer, _shapes.PRE_NORMS, hidden_size)
        yield from _shapes.attention(layer, hidden_size, heads, bias=True, out_bias=False)
        yield from _shapes.gated_mlp(f"{layer}.mlp", hidden_size, intermediate_size)

    return _shapes.decoder(c, _layer)


def kv_cache_specs(
    config: Mapping[str, Any], dtypes: CacheDtypes, block_size_multiple: int = 16
) -> dict[str, KVCacheSpec]:
    """Return what each layer caches, as `girih.arch` says."""
    return windowed_specs(Fields(config, DEFAULTS), dtypes, block_size_multiple)


def windowed_specs(c: Fields, dtypes: CacheDtypes, block_size_multiple: int) -> dict[str, KVCacheSpec]:
    """Return what each layer caches, by "use_sliding_window", "layer_types" and "max_window_layers"."""
    window = c.whole_or_none("sliding_window") if c.flag("use_sliding_window") else None
    first = c.whole("max_window_layers", at_least=0)

    def _kind(index: int) -> str:
        return FULL if window is None or index < first else SLIDING

    kinds = c.per_layer("layer_types", c.num_layers(), (FULL, SLIDING), _kind)
    return attention_specs(kinds, read_heads(c), dtypes, block_size_multiple, window=window)


def max_model_len(config: Mapping[str, Any]) -> int:
    """Return the model's own length limit in tokens."""
    return Fields(config, DEFAULTS).whole("max_position_embeddings")
