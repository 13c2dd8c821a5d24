"""`model_type` "llama": Llama 2 and 3, SmolLM2 and others that kept the name. Full attention in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from girih.arch import CacheDtypes, _shapes
from girih.arch._attention import FULL, attention_specs, read_heads
from girih.arch._common import RopeParameters, as_dict, refuse_features, rope_parameters
from girih.arch._decoder import DecoderConfig, decoder_fields
from girih.arch._fields import Fields
from girih.kv.spec import KVCacheSpec


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """What Llama has beside the fields of every decoder.

    Args:
        hidden_act: activation of the MLP.
        mlp_bias: the MLP's projections have a bias.
        rope: rotary embedding of every layer.
    """

    hidden_act: str
    mlp_bias: bool
    rope: RopeParameters


DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
    "mlp_bias": False, "rope_theta": 10_000.0,
}  # fmt: skip


def parse_config(config: Mapping[str, Any]) -> LlamaConfig:
    """Read config.json.

    Raises:
        ConfigError: a field that is wrong or not supported; the message names it.
    """
    refuse_features(config, ("quantization_config",))
    c = Fields(config, DEFAULTS)
    return LlamaConfig(
        **decoder_fields(c),
        hidden_act=c.choice("hidden_act", ("silu",)),
        mlp_bias=c.flag("mlp_bias"),
        rope=_rope(config, c.number("rope_theta"), max_model_len(config)),
    )


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the checkpoint by its Hugging Face name; a tied lm_head is not listed."""
    c = Fields(config, DEFAULTS)
    hidden_size, intermediate_size = c.whole("hidden_size"), c.whole("intermediate_size")
    heads, bias, mlp_bias = read_heads(c), c.flag("attention_bias"), c.flag("mlp_bias")

    def _layer(layer: str, _index: int) -> _shapes.Shapes:
        yield from _shapes.norms(layer, _shapes.PRE_NORMS, hidden_size)
        yield from _shapes.attention(layer, hidden_size, heads, bias=bias)
        yield from _shapes.gated_mlp(f"{layer}.mlp", hidden_size, intermediate_size, bias=mlp_bias)

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
    c = Fields(config, DEFAULTS)
    return attention_specs([FULL] * c.num_layers(), read_heads(c), dtypes, block_size_multiple)


def max_model_len(config: Mapping[str, Any]) -> int:
    """Return the model's own length limit in tokens."""
    return Fields(config, DEFAULTS).whole("max_position_embeddings")


def _rope(config: Mapping[str, Any], rope_theta: float, max_position_embeddings: int) -> RopeParameters:
    """Read `rope_scaling` (older, wins as in transformers), else `rope_parameters`; theta inside or beside it."""
    values = as_dict(config, "rope_scaling") or as_dict(config, "rope_parameters")
    if config.get("partial_rotary_factor") is not None:
        values.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    return rope_parameters(values, rope_theta, max_position_embeddings)
