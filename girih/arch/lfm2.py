"""`model_type` "lfm2": short convolutions, whose state is the last few tokens, and full attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from girih.arch import CacheDtypes, _shapes
from girih.arch._attention import FULL, attention_spec, read_heads
from girih.arch._fields import Fields
from girih.arch._state import CONV, conv1d, hybrid_specs, read_fields, rename
from girih.kv.spec import KVCacheSpec
from girih.kv.specs.state import StateSpec
from girih.units import round_up

DEFAULTS = {
    "vocab_size": 65536, "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128_000,
    "tie_word_embeddings": True, "conv_bias": False, "conv_L_cache": 3, "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True, "full_attn_idxs": None, "layer_types": None,
}  # fmt: skip
OLDER_NAMES = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, as `girih.arch` says."""
    c = read_fields(config, DEFAULTS, OLDER_NAMES)
    hidden_size, heads, kinds = c.whole("hidden_size"), read_heads(c), _layer_types(c)
    width, kernel_size, bias = _mlp_width(c), c.whole("conv_L_cache", at_least=2), c.flag("conv_bias")

    def _layer(layer: str, index: int) -> _shapes.Shapes:
        if kinds[index] == FULL:
            yield from _shapes.attention(layer, hidden_size, heads)
            yield from _shapes.norms(f"{layer}.self_attn", ("q_layernorm", "k_layernorm"), heads.head_dim)
        else:
            yield from conv1d(f"{layer}.conv.conv", hidden_size, kernel_size, bias=bias)
            yield from _shapes.linear(f"{layer}.conv.in_proj", 3 * hidden_size, hidden_size, bias=bias)
            yield from _shapes.linear(f"{layer}.conv.out_proj", hidden_size, hidden_size, bias=bias)
        for name in ("w1", "w3"):
            yield from _shapes.linear(f"{layer}.feed_forward.{name}", width, hidden_size)
        yield from _shapes.linear(f"{layer}.feed_forward.w2", hidden_size, width)
        yield from _shapes.norms(layer, ("operator_norm", "ffn_norm"), hidden_size)

    shapes = rename(_shapes.decoder(c, _layer), "model.norm.", "model.embedding_norm.")
    return rename(shapes, ".o_proj.", ".out_proj.")


def kv_cache_specs(
    config: Mapping[str, Any], dtypes: CacheDtypes, block_size_multiple: int = 16
) -> dict[str, KVCacheSpec]:
    """Return what each layer caches, as `girih.arch` says."""
    c = read_fields(config, DEFAULTS, OLDER_NAMES)
    state = StateSpec(
        shapes=((c.whole("hidden_size"), c.whole("conv_L_cache", at_least=2) - 1),),
        dtypes=(dtypes.activation,),  # no segments: each channel is on its own
        block_size_multiple=block_size_multiple,
    )
    attention = attention_spec(FULL, read_heads(c), dtypes, block_size_multiple)
    return hybrid_specs(_layer_types(c), attention, state, "conv")


def max_model_len(config: Mapping[str, Any]) -> int:
    """Return the model's own length limit in tokens."""
    return Fields(config, DEFAULTS).whole("max_position_embeddings")


def _layer_types(c: Fields) -> tuple[str, ...]:
    """Return the kind of each layer, from "layer_types" or "full_attn_idxs"; without either, all are full."""
    num_layers = c.num_layers()
    full = range(num_layers) if c.is_null("full_attn_idxs") else c.wholes("full_attn_idxs")
    return c.per_layer("layer_types", num_layers, (FULL, CONV), lambda index: FULL if index in full else CONV)


def _mlp_width(c: Fields) -> int:
    """Return the width of the MLP: the field, or two thirds of it times a factor, rounded up."""
    width = c.whole("intermediate_size")
    if not c.flag("block_auto_adjust_ff_dim"):
        return width
    width = int(c.number("block_ffn_dim_multiplier") * int(2 * width / 3))
    return round_up(width, c.whole("block_multiple_of"))
