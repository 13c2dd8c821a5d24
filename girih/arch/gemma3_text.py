"""`model_type` "gemma3_text": five sliding-window layers to one of full attention, each kind with its rotary base."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from girih.arch import _shapes
from girih.arch._common import (
    MAX_LAYERS,
    RopeParameters,
    as_dict,
    check_heads,
    read_bool,
    read_choice,
    read_float,
    read_int,
    refuse_features,
    rope_parameters,
)
from girih.errors import ConfigError
from girih.kv.spec import KVCacheSpec
from girih.kv.specs.full_attention import FullAttentionSpec
from girih.kv.specs.sliding_window import SlidingWindowSpec

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Gemma3TextConfig:
    """Hyper-parameters under the names of config.json; what is missing there has Hugging Face's default.

    Args:
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP.
        num_hidden_layers: decoder layers.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads.
        head_dim: elements of a head.
        hidden_activation: activation of the MLP.
        max_position_embeddings: the model's own length limit in tokens.
        rms_norm_eps: added to the mean square in norms.
        tie_word_embeddings: the output layer is the embedding.
        attention_bias: the q, k, v and o projections have a bias.
        query_pre_attn_scalar: attention scores are scaled by its inverse square root.
        sliding_window: tokens a query of a sliding layer sees, itself included.
        layer_types: "full_attention" or "sliding_attention" per layer.
        rope_full: rotary embedding of the full layers.
        rope_sliding: rotary embedding of the sliding layers.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_activation: str
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    query_pre_attn_scalar: float
    sliding_window: int
    layer_types: tuple[str, ...]
    rope_full: RopeParameters
    rope_sliding: RopeParameters


def parse_config(config: Mapping[str, Any]) -> Gemma3TextConfig:
    """Read config.json.

    Raises:
        ConfigError: a field that is wrong or not supported; the message names it.
    """
    refuse_features(
        config,
        ("quantization_config", "use_bidirectional_attention", "final_logit_softcapping", "attn_logit_softcapping"),
    )
    num_heads = read_int(config, "num_attention_heads", 8)
    num_kv_heads = read_int(config, "num_key_value_heads", 4)
    head_dim = read_int(config, "head_dim", 256)
    num_layers = read_int(config, "num_hidden_layers", 26, MAX_LAYERS)
    max_positions = read_int(config, "max_position_embeddings", 131_072)
    check_heads(num_heads, num_kv_heads, head_dim)
    rope_full, rope_sliding = _ropes(config, max_positions)
    return Gemma3TextConfig(
        vocab_size=read_int(config, "vocab_size", 262_208),
        hidden_size=read_int(config, "hidden_size", 2304),
        intermediate_size=read_int(config, "intermediate_size", 9216),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_activation=read_choice(config, "hidden_activation", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",)),
        max_position_embeddings=max_positions,
        rms_norm_eps=read_float(config, "rms_norm_eps", 1e-6),
        tie_word_embeddings=read_bool(config, "tie_word_embeddings", True),
        attention_bias=read_bool(config, "attention_bias", False),
        query_pre_attn_scalar=read_float(config, "query_pre_attn_scalar", 256),
        sliding_window=_sliding_window(config),
        layer_types=_layer_types(config, num_layers),
        rope_full=rope_full,
        rope_sliding=rope_sliding,
    )


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the checkpoint by its Hugging Face name; a tied lm_head is not listed."""
    c = parse_config(config)
    shapes = dict(_shapes.embeddings(c.vocab_size, c.hidden_size, tied=c.tie_word_embeddings))
    for i in range(c.num_hidden_layers):
        layer = f"model.layers.{i}"
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{layer}.{norm}_layernorm.weight"] = (c.hidden_size,)
        for name in ("q_norm", "k_norm"):
            shapes[f"{layer}.self_attn.{name}.weight"] = (c.head_dim,)
        shapes.update(
            _shapes.attention(
                layer,
                hidden_size=c.hidden_size,
                num_heads=c.num_attention_heads,
                num_kv_heads=c.num_key_value_heads,
                head_dim=c.head_dim,
                bias=c.attention_bias,
            )
        )
        mlp = _shapes.gated_mlp(layer, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, bias=False)
        shapes.update(mlp)
    return shapes


def kv_cache_specs(config: Mapping[str, Any], kv_dtype: str, block_size_multiple: int = 16) -> dict[str, KVCacheSpec]:
    """Return what each layer's cache needs, by layer name, in model order.

    Args:
        config: config.json.
        kv_dtype: dtype name of keys and values.
        block_size_multiple: tokens per block must be a multiple of this, says the attention backend.
    """
    c = parse_config(config)
    heads, size = c.num_key_value_heads, c.head_dim
    by_type: dict[str, KVCacheSpec] = {
        FULL: FullAttentionSpec(heads, size, kv_dtype, block_size_multiple=block_size_multiple),
        SLIDING: SlidingWindowSpec(heads, size, kv_dtype, c.sliding_window, block_size_multiple=block_size_multiple),
    }
    return {f"model.layers.{i}.self_attn": by_type[kind] for i, kind in enumerate(c.layer_types)}


def max_model_len(config: Mapping[str, Any]) -> int:
    """Return the model's own length limit in tokens."""
    return parse_config(config).max_position_embeddings


def _sliding_window(config: Mapping[str, Any]) -> int:
    """Return the window; null is refused, since sliding layers without one are another model."""
    if "sliding_window" in config and config["sliding_window"] is None:
        raise ConfigError("config.json: sliding_window is null; give the window of the sliding layers in tokens")
    return read_int(config, "sliding_window", 4096)


def _layer_types(config: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """Return the kind of each layer; where config.json has no list, every sixth is full (or as its pattern says)."""
    types = config.get("layer_types")
    if types is None:
        pattern = read_int(config, "sliding_window_pattern", 6)
        return tuple(SLIDING if (i + 1) % pattern else FULL for i in range(num_layers))
    if not isinstance(types, (list, tuple)) or len(types) != num_layers:
        raise ConfigError(f"config.json: layer_types must list one type for each of the {num_layers} layers")
    if unknown := sorted({str(name) for name in types} - {FULL, SLIDING}):
        raise ConfigError(f"config.json: layer_types has {', '.join(unknown)}; supported: {FULL}, {SLIDING}")
    return tuple(types)


def _ropes(config: Mapping[str, Any], max_position_embeddings: int) -> tuple[RopeParameters, RopeParameters]:
    """Read the rotary embeddings of full and sliding layers; `rope_scaling`, the older format, is for full ones."""
    both = as_dict(config, "rope_parameters")
    if unknown := sorted(both.keys() - {FULL, SLIDING}):
        raise ConfigError(f"config.json: rope_parameters has {', '.join(unknown)}; it takes {FULL} and {SLIDING}")
    full = as_dict(both, FULL) | as_dict(config, "rope_scaling")
    full_theta = read_float(config, "rope_theta", 1_000_000.0)
    sliding_theta = read_float(config, "rope_local_base_freq", 10_000.0)
    return (
        rope_parameters(full, full_theta, max_position_embeddings),
        rope_parameters(as_dict(both, SLIDING), sliding_theta, max_position_embeddings),
    )
