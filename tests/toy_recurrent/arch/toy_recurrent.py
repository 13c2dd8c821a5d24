"""`model_type` "toy_recurrent": facts of the toy, as the files in `girih/arch` have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from girih.arch import CacheDtypes
from girih.kv.spec import KVCacheSpec
from girih.kv.specs.full_attention import FullAttentionSpec
from girih.kv.specs.sliding_window import SlidingWindowSpec
from girih.kv.specs.state import StateSpec

FULL, SLIDING, RECURRENT = "full_attention", "sliding_attention", "recurrent"


@dataclass(frozen=True)
class ToyConfig:
    """Hyper-parameters; `inner_size` channels of the recurrence see `conv_kernel` tokens through a convolution."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    sliding_window: int
    inner_size: int
    conv_kernel: int
    layer_types: tuple[str, ...]
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool


def parse_config(config: Mapping[str, Any]) -> ToyConfig:
    """Read config.json, where every field is given."""
    values = {field.name: config[field.name] for field in fields(ToyConfig)}
    return ToyConfig(**{**values, "layer_types": tuple(values["layer_types"])})


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor."""
    c = parse_config(config)
    q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    mixer = {
        "in_proj.weight": (3 * c.inner_size, c.hidden_size),
        "conv.weight": (c.inner_size, c.conv_kernel),
        "out_proj.weight": (c.hidden_size, c.inner_size),
    }
    attention = {
        "q_proj.weight": (q_size, c.hidden_size),
        "k_proj.weight": (kv_size, c.hidden_size),
        "v_proj.weight": (kv_size, c.hidden_size),
        "o_proj.weight": (c.hidden_size, q_size),
    }
    mlp = {
        "gate_proj.weight": (c.intermediate_size, c.hidden_size),
        "up_proj.weight": (c.intermediate_size, c.hidden_size),
        "down_proj.weight": (c.hidden_size, c.intermediate_size),
    }
    for i, kind in enumerate(c.layer_types):
        parts = {"mixer": mixer if kind == RECURRENT else attention, "mlp": mlp}
        for part, tensors in parts.items():
            shapes |= {f"model.layers.{i}.{part}.{name}": shape for name, shape in tensors.items()}
            shapes[f"model.layers.{i}.{part}_norm.weight"] = (c.hidden_size,)
    return shapes | {"model.norm.weight": (c.hidden_size,), "lm_head.weight": (c.vocab_size, c.hidden_size)}


def kv_cache_specs(
    config: Mapping[str, Any], dtypes: CacheDtypes, block_size_multiple: int = 16
) -> dict[str, KVCacheSpec]:
    """Return what each layer caches."""
    c = parse_config(config)
    heads, multiple = (c.num_key_value_heads, c.head_dim, dtypes.kv), {"block_size_multiple": block_size_multiple}
    by_kind: dict[str, KVCacheSpec] = {
        FULL: FullAttentionSpec(*heads, **multiple),
        SLIDING: SlidingWindowSpec(*heads, c.sliding_window, **multiple),
        RECURRENT: StateSpec(((c.inner_size, c.conv_kernel - 1), (c.inner_size,)), (dtypes.activation, dtypes.state)),
    }
    return {f"model.layers.{i}.mixer": by_kind[kind] for i, kind in enumerate(c.layer_types)}


def max_model_len(config: Mapping[str, Any]) -> int:
    """Return the model's own length limit in tokens."""
    return parse_config(config).max_position_embeddings
