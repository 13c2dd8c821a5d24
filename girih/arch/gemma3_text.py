"""`model_type` "gemma3_text": five sliding-window layers to one of full attention, each kind with its rotary base."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from girih.arch import CacheDtypes, _shapes
from girih.arch._attention import FULL, SLIDING, alternating_specs, layer_kinds, read_heads
from girih.arch._common import RopeParameters, as_dict, refuse_features, rope_parameters
from girih.arch._decoder import DecoderConfig, decoder_fields
from girih.arch._fields import Fields
from girih.errors import ConfigError
from girih.kv.spec import KVCacheSpec


@dataclass(frozen=True)
class Gemma3TextConfig(DecoderConfig):
    """What Gemma 3 has beside the fields of every decoder.

    Args:
        hidden_activation: activation of the MLP.
        query_pre_attn_scalar: attention scores are scaled by its inverse square root.
        sliding_window: tokens a query of a sliding layer sees, itself included.
        layer_types: "full_attention" or "sliding_attention" per layer.
        rope_full: rotary embedding of the full layers.
        rope_sliding: rotary embedding of the sliding layers.
    """

    hidden_activation: str
    query_pre_attn_scalar: float
    sliding_window: int
    layer_types: tuple[str, ...]
    rope_full: RopeParameters
    rope_sliding: RopeParameters


DEFAULTS = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "attention_bias": False,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 6, "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}  # fmt: skip


def parse_config(config: Mapping[str, Any]) -> Gemma3TextConfig:
    """Read config.json.

    Raises:
        ConfigError: a field that is wrong or not supported; the message names it.
    """
    refuse_features(
        config,
        ("quantization_config", "use_bidirectional_attention", "final_logit_softcapping", "attn_logit_softcapping"),
    )
    c = Fields(config, DEFAULTS)
    rope_full, rope_sliding = _ropes(config, max_model_len(config))
    return Gemma3TextConfig(
        **decoder_fields(c),
        hidden_activation=c.choice("hidden_activation", ("gelu_pytorch_tanh",)),
        query_pre_attn_scalar=c.number("query_pre_attn_scalar"),
        sliding_window=c.whole("sliding_window"),
        layer_types=layer_kinds(c, c.whole("sliding_window_pattern")),
        rope_full=rope_full,
        rope_sliding=rope_sliding,
    )


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the checkpoint by its Hugging Face name; a tied lm_head is not listed."""
    c = Fields(config, DEFAULTS)
    hidden_size, intermediate_size = c.whole("hidden_size"), c.whole("intermediate_size")
    heads, bias = read_heads(c), c.flag("attention_bias")

    def _layer(layer: str, _index: int) -> _shapes.Shapes:
        yield from _shapes.norms(layer, _shapes.SANDWICH_NORMS, hidden_size)
        yield from _shapes.norms(f"{layer}.self_attn", _shapes.QK_NORMS, heads.head_dim)
        yield from _shapes.attention(layer, hidden_size, heads, bias=bias)
        yield from _shapes.gated_mlp(f"{layer}.mlp", hidden_size, intermediate_size)

    return _shapes.decoder(c, _layer)


def kv_cache_specs(
    config: Mapping[str, Any], dtypes: CacheDtypes, block_size_multiple: int = 16
) -> dict[str, KVCacheSpec]:
    """Return what each layer's cache needs, by layer name, in model order.

    Args:
        config: config.json.
        dtypes: of keys and values.
        block_size_multiple: tokens per block must be a multiple of this, says the attention backend.
    """
    refuse_features(config, ("use_bidirectional_attention",))  # an encoder: it keeps no cache
    c = Fields(config, DEFAULTS)
    return alternating_specs(c, c.whole("sliding_window_pattern"), dtypes, block_size_multiple)


def max_model_len(config: Mapping[str, Any]) -> int:
    """Return the model's own length limit in tokens."""
    return Fields(config, DEFAULTS).whole("max_position_embeddings")


def _ropes(config: Mapping[str, Any], max_position_embeddings: int) -> tuple[RopeParameters, RopeParameters]:
    """Read the rotary embeddings of full and sliding layers; `rope_scaling`, the older format, is for full ones."""
    both = as_dict(config, "rope_parameters")
    if unknown := sorted(both.keys() - {FULL, SLIDING}):
        raise ConfigError(f"config.json: rope_parameters has {', '.join(unknown)}; it takes {FULL} and {SLIDING}")
    full = as_dict(both, FULL) | as_dict(config, "rope_scaling")
    c = Fields(config, DEFAULTS)
    return (
        rope_parameters(full, c.number("rope_theta"), max_position_embeddings),
        rope_parameters(as_dict(both, SLIDING), c.number("rope_local_base_freq"), max_position_embeddings),
    )
