"""`model_type` "qwen3_moe": qwen3's attention over experts; with "use_sliding_window" every layer has the window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from girih.arch import CacheDtypes, _shapes
from girih.arch._attention import SLIDING, attention_specs, read_heads
from girih.arch._fields import Fields
from girih.kv.spec import KVCacheSpec

DEFAULTS = {
    "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": None,
    "max_position_embeddings": 32768, "tie_word_embeddings": False, "attention_bias": False,
    "use_sliding_window": False, "sliding_window": 4096, "num_experts": 128, "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}  # fmt: skip


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, as `girih.arch` says."""
    c = Fields(config, DEFAULTS)
    hidden_size, heads, bias = c.whole("hidden_size"), read_heads(c), c.flag("attention_bias")
    num_experts = c.whole("num_local_experts" if c.has("num_local_experts") else "num_experts", at_least=0)
    dense, every = c.wholes("mlp_only_layers"), c.whole("decoder_sparse_step")

    def _layer(layer: str, index: int) -> _shapes.Shapes:
        yield from _shapes.norms(layer, _shapes.PRE_NORMS, hidden_size)
        yield from _shapes.norms(f"{layer}.self_attn", _shapes.QK_NORMS, heads.head_dim)
        yield from _shapes.attention(layer, hidden_size, heads, bias=bias)
        if index in dense or not num_experts or (index + 1) % every:
            yield from _shapes.gated_mlp(f"{layer}.mlp", hidden_size, c.whole("intermediate_size"))
        else:
            size = c.whole("moe_intermediate_size")
            yield from _shapes.experts(f"{layer}.mlp.experts", num_experts, hidden_size, size)
            yield from _shapes.linear(f"{layer}.mlp.gate", num_experts, hidden_size)

    return _shapes.decoder(c, _layer)


def kv_cache_specs(
    config: Mapping[str, Any], dtypes: CacheDtypes, block_size_multiple: int = 16
) -> dict[str, KVCacheSpec]:
    """Return what each layer caches, as `girih.arch` says."""
    c = Fields(config, DEFAULTS)
    window = c.whole_or_none("sliding_window") if c.flag("use_sliding_window") else None
    return attention_specs([SLIDING] * c.num_layers(), read_heads(c), dtypes, block_size_multiple, window=window)


def max_model_len(config: Mapping[str, Any]) -> int:
    """Return the model's own length limit in tokens."""
    return Fields(config, DEFAULTS).whole("max_position_embeddings")
