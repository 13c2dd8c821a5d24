"""`model_type` "jamba": Mamba 1 and every eighth layer of full attention; experts in every second layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from girih.arch import CacheDtypes, _shapes
from girih.arch._attention import FULL, attention_spec, read_heads
from girih.arch._fields import Fields
from girih.arch._state import LINEAR, conv1d, hybrid_specs, read_fields, rename
from girih.kv.spec import KVCacheSpec
from girih.kv.specs.state import StateSpec
from girih.units import cdiv

DEFAULTS = {
    "vocab_size": 65536, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 262_144,
    "tie_word_embeddings": False, "num_experts": 16, "expert_layer_period": 2, "expert_layer_offset": 1,
    "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_dt_rank": "auto", "mamba_conv_bias": True, "mamba_proj_bias": False,
}  # fmt: skip


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, as `girih.arch` says."""
    c = read_fields(config, DEFAULTS)
    hidden_size, intermediate_size, heads = c.whole("hidden_size"), c.whole("intermediate_size"), read_heads(c)
    kinds, num_experts, is_sparse = _layer_types(c), c.whole("num_experts"), _every(c, "expert_layer")

    def _layer(layer: str, index: int) -> _shapes.Shapes:
        yield from _shapes.norms(layer, ("input_layernorm", "pre_ff_layernorm"), hidden_size)
        if kinds[index] == FULL:
            yield from _shapes.attention(layer, hidden_size, heads)
        else:
            yield from _mamba(c, f"{layer}.mamba", hidden_size)
        module = f"{layer}.feed_forward"
        if is_sparse[index] and num_experts > 1:
            yield f"{module}.router.weight", (num_experts, hidden_size)
            yield from _shapes.experts(f"{module}.experts", num_experts, hidden_size, intermediate_size)
        else:
            yield from _shapes.gated_mlp(module, hidden_size, intermediate_size)

    return rename(_shapes.decoder(c, _layer), "model.norm.", "model.final_layernorm.")


def kv_cache_specs(
    config: Mapping[str, Any], dtypes: CacheDtypes, block_size_multiple: int = 16
) -> dict[str, KVCacheSpec]:
    """Return what each layer caches, as `girih.arch` says."""
    c = read_fields(config, DEFAULTS)
    channels = _channels(c)
    state = StateSpec(
        shapes=((channels, c.whole("mamba_d_conv", at_least=2) - 1), (channels, c.whole("mamba_d_state"))),
        dtypes=(dtypes.activation, dtypes.state),  # no segments: each channel is on its own
        block_size_multiple=block_size_multiple,
    )
    return hybrid_specs(
        _layer_types(c), attention_spec(FULL, read_heads(c), dtypes, block_size_multiple), state, "mamba"
    )


def max_model_len(config: Mapping[str, Any]) -> int:
    """Return the model's own length limit in tokens."""
    return Fields(config, DEFAULTS).whole("max_position_embeddings")


def _layer_types(c: Fields) -> tuple[str, ...]:
    return tuple(FULL if is_attention else LINEAR for is_attention in _every(c, "attn_layer"))


def _every(c: Fields, name: str) -> tuple[bool, ...]:
    """Tell for each layer whether it is the one at "NAME_offset" of its "NAME_period" layers."""
    period = c.whole(f"{name}_period")
    offset = c.whole(f"{name}_offset", at_least=0, at_most=period - 1)
    return tuple(index % period == offset for index in range(c.num_layers()))


def _channels(c: Fields) -> int:
    return c.whole("mamba_expand") * c.whole("hidden_size")


def _mamba(c: Fields, module: str, hidden_size: int) -> _shapes.Shapes:
    """Yield (tensor name, shape) of a Mamba 1 layer (Gu and Dao, 2023) with norms on dt, B and C."""
    channels, state_size, bias = _channels(c), c.whole("mamba_d_state"), c.flag("mamba_proj_bias")
    dt_rank = c.whole("mamba_dt_rank", if_null=cdiv(hidden_size, 16))
    yield f"{module}.A_log", (channels, state_size)
    yield f"{module}.D", (channels,)
    yield from conv1d(f"{module}.conv1d", channels, c.whole("mamba_d_conv"), bias=c.flag("mamba_conv_bias"))
    yield from _shapes.linear(f"{module}.in_proj", 2 * channels, hidden_size, bias=bias)
    yield from _shapes.linear(f"{module}.x_proj", dt_rank + 2 * state_size, channels)
    yield from _shapes.linear(f"{module}.dt_proj", channels, dt_rank, bias=True)
    yield from _shapes.linear(f"{module}.out_proj", hidden_size, channels, bias=bias)
    yield from _shapes.norms(module, ("dt_layernorm",), dt_rank)
    yield from _shapes.norms(module, ("b_layernorm", "c_layernorm"), state_size)
