"""`model_type` "llama": Llama 2 and 3, SmolLM2 and others that kept the name. Full attention in every layer."""

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
from girih.kv.spec import KVCacheSpec
from girih.kv.specs.full_attention import FullAttentionSpec


@dataclass(frozen=True)
class LlamaConfig:
    """Hyper-parameters under the names of config.json; what is missing there has Hugging Face's default.

    Args:
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP.
        num_hidden_layers: decoder layers.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads.
        head_dim: elements of a head.
        hidden_act: activation of the MLP.
        max_position_embeddings: the model's own length limit in tokens.
        rms_norm_eps: added to the mean square in norms.
        tie_word_embeddings: the output layer is the embedding.
        attention_bias: the q, k, v and o projections have a bias.
        mlp_bias: the MLP's projections have a bias.
        rope: rotary embedding of every layer.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: RopeParameters


def parse_config(config: Mapping[str, Any]) -> LlamaConfig:
    """Read config.json.

    Raises:
        ConfigError: a field that is wrong or not supported; the message names it.
    """
    refuse_features(config, ("quantization_config",))
    num_heads = read_int(config, "num_attention_heads", 32)
    hidden_size = read_int(config, "hidden_size", 4096)
    num_kv_heads = read_int(config, "num_key_value_heads", num_heads)
    head_dim = read_int(config, "head_dim", max(1, hidden_size // num_heads))
    max_positions = read_int(config, "max_position_embeddings", 2048)
    check_heads(num_heads, num_kv_heads, head_dim)
    return LlamaConfig(
        vocab_size=read_int(config, "vocab_size", 32000),
        hidden_size=hidden_size,
        intermediate_size=read_int(config, "intermediate_size", 11008),
        num_hidden_layers=read_int(config, "num_hidden_layers", 32, MAX_LAYERS),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_act=read_choice(config, "hidden_act", "silu", ("silu",)),
        max_position_embeddings=max_positions,
        rms_norm_eps=read_float(config, "rms_norm_eps", 1e-6),
        tie_word_embeddings=read_bool(config, "tie_word_embeddings", False),
        attention_bias=read_bool(config, "attention_bias", False),
        mlp_bias=read_bool(config, "mlp_bias", False),
        rope=_rope(config, max_positions),
    )


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the checkpoint by its Hugging Face name; a tied lm_head is not listed."""
    c = parse_config(config)
    shapes = dict(_shapes.embeddings(c.vocab_size, c.hidden_size, tied=c.tie_word_embeddings))
    for i in range(c.num_hidden_layers):
        layer = f"model.layers.{i}"
        for norm in ("input", "post_attention"):
            shapes[f"{layer}.{norm}_layernorm.weight"] = (c.hidden_size,)
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
        mlp = _shapes.gated_mlp(
            layer, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, bias=c.mlp_bias
        )
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
    spec = FullAttentionSpec(c.num_key_value_heads, c.head_dim, kv_dtype, block_size_multiple=block_size_multiple)
    return {f"model.layers.{i}.self_attn": spec for i in range(c.num_hidden_layers)}


def max_model_len(config: Mapping[str, Any]) -> int:
    """Return the model's own length limit in tokens."""
    return parse_config(config).max_position_embeddings


def _rope(config: Mapping[str, Any], max_position_embeddings: int) -> RopeParameters:
    """Read `rope_scaling` (older, wins as in transformers), else `rope_parameters`; theta inside or beside it."""
    values = as_dict(config, "rope_scaling") or as_dict(config, "rope_parameters")
    if config.get("partial_rotary_factor") is not None:
        values.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    return rope_parameters(values, read_float(config, "rope_theta", 10_000.0), max_position_embeddings)
