"""`model_type` "qwen3_next": three layers of a gated delta net to one of full attention; experts with one shared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from girih.arch import CacheDtypes, _shapes
from girih.arch._attention import FULL, attention_spec, read_heads
from girih.arch._fields import Fields
from girih.arch._state import LINEAR, conv1d, hybrid_kinds, hybrid_specs
from girih.kv.spec import KVCacheSpec
from girih.kv.specs.state import StateSpec

DEFAULTS = {
    "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32_768,
    "tie_word_embeddings": False, "attention_bias": False, "layer_types": None, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "decoder_sparse_step": 1, "mlp_only_layers": None,
    "num_experts": 512, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, as `girih.arch` says."""
    c = Fields(config, DEFAULTS)
    hidden_size, heads, bias = c.whole("hidden_size"), read_heads(c), c.flag("attention_bias")
    kinds, dense_layers = _layer_types(c), c.wholes("mlp_only_layers")
    num_experts, sparse_step = c.whole("num_experts", at_least=0), c.whole("decoder_sparse_step")

    def _layer(layer: str, index: int) -> _shapes.Shapes:
        yield from _shapes.norms(layer, _shapes.PRE_NORMS, hidden_size)
        if kinds[index] == FULL:
            yield from _shapes.attention(layer, hidden_size, heads, bias=bias)
            queries = 2 * heads.num_heads * heads.head_dim  # half of them are gates of the output
            yield from _shapes.linear(f"{layer}.self_attn.q_proj", queries, hidden_size, bias=bias)  # takes the place
            yield from _shapes.norms(f"{layer}.self_attn", _shapes.QK_NORMS, heads.head_dim)
        else:
            yield from _delta_net(c, f"{layer}.linear_attn", hidden_size)
        if index in dense_layers or not num_experts or (index + 1) % sparse_step:
            yield from _shapes.gated_mlp(f"{layer}.mlp", hidden_size, c.whole("intermediate_size"))
            return
        shared_size = c.whole("shared_expert_intermediate_size")
        yield f"{layer}.mlp.gate.weight", (num_experts, hidden_size)
        yield from _shapes.experts(f"{layer}.mlp.experts", num_experts, hidden_size, c.whole("moe_intermediate_size"))
        yield from _shapes.gated_mlp(f"{layer}.mlp.shared_expert", hidden_size, shared_size)
        yield f"{layer}.mlp.shared_expert_gate.weight", (1, hidden_size)

    return _shapes.decoder(c, _layer)


def kv_cache_specs(
    config: Mapping[str, Any], dtypes: CacheDtypes, block_size_multiple: int = 16
) -> dict[str, KVCacheSpec]:
    """Return what each layer caches, as `girih.arch` says."""
    c = Fields(config, DEFAULTS)
    num_keys, key_size = c.whole("linear_num_key_heads"), c.whole("linear_key_head_dim")
    num_values, value_size = c.whole("linear_num_value_heads"), c.whole("linear_value_head_dim")
    keys, values = (num_keys * key_size, num_keys), (num_values * value_size, num_values)
    state = StateSpec(
        shapes=((_conv_dim(c), c.whole("linear_conv_kernel_dim", at_least=2) - 1), (num_values, key_size, value_size)),
        dtypes=(dtypes.activation, dtypes.state),
        segments=((keys, keys, values), ((num_values, num_values),)),  # queries are as many as keys
        block_size_multiple=block_size_multiple,
    )
    attention = attention_spec(FULL, read_heads(c), dtypes, block_size_multiple)
    return hybrid_specs(_layer_types(c), attention, state, "linear_attn")


def max_model_len(config: Mapping[str, Any]) -> int:
    """Return the model's own length limit in tokens."""
    return Fields(config, DEFAULTS).whole("max_position_embeddings")


def _layer_types(c: Fields) -> tuple[str, ...]:
    """Return the kind of each layer; where config.json has no list, every fourth is full (or as it says)."""
    interval = c.whole("full_attention_interval")
    return hybrid_kinds(c, "layer_types", lambda index: LINEAR if (index + 1) % interval else FULL)


def _conv_dim(c: Fields) -> int:
    """Return the channels of the convolution: queries, keys and values."""
    keys = c.whole("linear_num_key_heads") * c.whole("linear_key_head_dim")
    return 2 * keys + _value_dim(c)


def _value_dim(c: Fields) -> int:
    return c.whole("linear_num_value_heads") * c.whole("linear_value_head_dim")


def _delta_net(c: Fields, module: str, hidden_size: int) -> _shapes.Shapes:
    """Yield (tensor name, shape) of a gated delta net (Yang et al., "Gated Delta Networks", 2024)."""
    num_values, value_dim = c.whole("linear_num_value_heads"), _value_dim(c)
    for name in ("dt_bias", "A_log"):
        yield f"{module}.{name}", (num_values,)
    yield from conv1d(f"{module}.conv1d", _conv_dim(c), c.whole("linear_conv_kernel_dim"), bias=False)
    yield from _shapes.linear(f"{module}.in_proj_qkvz", _conv_dim(c) + value_dim, hidden_size)
    yield from _shapes.linear(f"{module}.in_proj_ba", 2 * num_values, hidden_size)
    yield f"{module}.norm.weight", (c.whole("linear_value_head_dim"),)
    yield from _shapes.linear(f"{module}.out_proj", hidden_size, value_dim)
