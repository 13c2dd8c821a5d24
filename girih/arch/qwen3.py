"""`model_type` "qwen3": norms of queries and keys; windows as in qwen2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from girih.arch import CacheDtypes, _shapes
from girih.arch._attention import read_heads
from girih.arch._fields import Fields
from girih.arch.qwen2 import windowed_specs
from girih.kv.spec import KVCacheSpec

DEFAULTS = {
    "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768,
    "tie_word_embeddings": False, "attention_bias": False, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28,
}  # fmt: skip


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, as `girih.arch` says."""
    c = Fields(config, DEFAULTS)
    hidden_size, intermediate_size, heads = c.whole("hidden_size"), c.whole("intermediate_size"), read_heads(c)
    bias = c.flag("attention_bias")

    def _layer(layer: str, _index: int) -> _shapes.Shapes:
        yield from _shapes.norms(layer, _shapes.PRE_NORMS, hidden_size)
        yield from _shapes.norms(f"{layer}.self_attn", _shapes.QK_NORMS, heads.head_dim)
        yield from _shapes.attention(layer, hidden_size, heads, bias=bias)
        yield from _shapes.gated_mlp(f"{layer}.mlp", hidden_size, intermediate_size)

    return _shapes.decoder(c, _layer)


def kv_cache_specs(
    config: Mapping[str, Any], dtypes: CacheDtypes, block_size_multiple: int = 16
) -> dict[str, KVCacheSpec]:
    """Return what each layer caches, as `girih.arch` says."""
    return windowed_specs(Fields(config, DEFAULTS), dtypes, block_size_multiple)


def max_model_len(config: Mapping[str, Any]) -> int:
    """Return the model's own length limit in tokens."""
    return Fields(config, DEFAULTS).whole("max_position_embeddings")
