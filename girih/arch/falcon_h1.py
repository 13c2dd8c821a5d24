"""`model_type` "falcon_h1": full attention and Mamba 2 side by side in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from girih.arch import CacheDtypes, _shapes
from girih.arch._attention import FULL, attention_spec, read_heads
from girih.arch._fields import Fields
from girih.arch._state import MAMBA2_DEFAULTS, Mamba2, read_fields, read_mamba2, rename
from girih.kv.spec import KVCacheSpec

DEFAULTS = {
    "vocab_size": 128_000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "projectors_bias": False,
    "mamba_d_ssm": 1024, "mamba_rms_norm": False, **MAMBA2_DEFAULTS,
}  # fmt: skip


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, as `girih.arch` says."""
    c = read_fields(config, DEFAULTS)
    hidden_size, intermediate_size = c.whole("hidden_size"), c.whole("intermediate_size")
    heads, mamba = read_heads(c), _mamba(c)

    def _layer(layer: str, _index: int) -> _shapes.Shapes:
        yield from _shapes.norms(layer, ("input_layernorm", "pre_ff_layernorm"), hidden_size)
        yield from _shapes.attention(layer, hidden_size, heads, bias=c.flag("attention_bias"))
        yield from mamba.weight_shapes(f"{layer}.mamba", hidden_size)
        bias = c.flag("mlp_bias")
        yield from _shapes.gated_mlp(f"{layer}.feed_forward", hidden_size, intermediate_size, bias=bias)

    return rename(_shapes.decoder(c, _layer), "model.norm.", "model.final_layernorm.")


def kv_cache_specs(
    config: Mapping[str, Any], dtypes: CacheDtypes, block_size_multiple: int = 16
) -> dict[str, KVCacheSpec]:
    """Return what each layer caches, as `girih.arch` says: keys and values, and a state."""
    c = read_fields(config, DEFAULTS)
    attention = attention_spec(FULL, read_heads(c), dtypes, block_size_multiple)
    state = _mamba(c).state_spec(dtypes, block_size_multiple)
    specs: dict[str, KVCacheSpec] = {}
    for index in range(c.num_layers()):
        layer = f"model.layers.{index}"
        specs |= {f"{layer}.self_attn": attention, f"{layer}.mamba": state}
    return specs


def max_model_len(config: Mapping[str, Any]) -> int:
    """Return the model's own length limit in tokens."""
    return Fields(config, DEFAULTS).whole("max_position_embeddings")


def _mamba(c: Fields) -> Mamba2:
    mamba = read_mamba2(c, c.whole_or_none("mamba_d_ssm"))
    return replace(mamba, out_bias=c.flag("projectors_bias"), norm=c.flag("mamba_rms_norm"))
