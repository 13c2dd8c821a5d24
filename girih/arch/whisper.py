"""`model_type` "whisper": an encoder of sound; each layer of the decoder attends to its own tokens and to the encoder.

The encoder runs once and caches nothing itself; its output's keys and values stay as long as the request runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from girih.arch import CacheDtypes, _shapes
from girih.arch._fields import Fields
from girih.errors import ConfigError
from girih.kv.spec import KVCacheSpec
from girih.kv.specs.cross_attention import CrossAttentionSpec
from girih.kv.specs.full_attention import FullAttentionSpec

DEFAULTS = {
    "vocab_size": 51865, "num_mel_bins": 80, "d_model": 384, "encoder_layers": 4, "encoder_ffn_dim": 1536,
    "decoder_layers": 4, "decoder_attention_heads": 6, "decoder_ffn_dim": 1536, "max_source_positions": 1500,
    "max_target_positions": 448, "tie_word_embeddings": True,
}  # fmt: skip


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, as `girih.arch` says."""
    c = Fields(config, DEFAULTS)
    width, vocab_size = c.whole("d_model"), c.whole("vocab_size")
    encoder, decoder = "model.encoder", "model.decoder"
    shapes: dict[str, tuple[int, ...]] = {
        f"{encoder}.conv1.weight": (width, c.whole("num_mel_bins"), 3),
        f"{encoder}.conv1.bias": (width,),
        f"{encoder}.conv2.weight": (width, width, 3),
        f"{encoder}.conv2.bias": (width,),
        f"{encoder}.embed_positions.weight": (c.whole("max_source_positions"), width),
    }
    for index in range(c.num_layers("encoder_layers")):
        shapes.update(_layer(f"{encoder}.layers.{index}", width, c.whole("encoder_ffn_dim"), ("self_attn",)))
    shapes.update(_norm(f"{encoder}.layer_norm", width))
    shapes[f"{decoder}.embed_tokens.weight"] = (vocab_size, width)
    shapes[f"{decoder}.embed_positions.weight"] = (c.whole("max_target_positions"), width)
    for index in range(c.num_layers("decoder_layers")):
        attentions = ("self_attn", "encoder_attn")
        shapes.update(_layer(f"{decoder}.layers.{index}", width, c.whole("decoder_ffn_dim"), attentions))
    shapes.update(_norm(f"{decoder}.layer_norm", width))
    if not c.flag("tie_word_embeddings"):
        shapes["proj_out.weight"] = (vocab_size, width)
    return shapes


def kv_cache_specs(
    config: Mapping[str, Any], dtypes: CacheDtypes, block_size_multiple: int = 16
) -> dict[str, KVCacheSpec]:
    """Return what each layer of the decoder caches, as `girih.arch` says: its own tokens, and the encoder's output."""
    c = Fields(config, DEFAULTS)
    width, num_heads = c.whole("d_model"), c.whole("decoder_attention_heads")
    if width % num_heads:
        raise ConfigError(f"config.json: d_model={width} must be a multiple of decoder_attention_heads={num_heads}")
    head_dim, num_positions = width // num_heads, c.whole("max_source_positions")
    own = FullAttentionSpec(num_heads, head_dim, dtypes.kv, block_size_multiple=block_size_multiple)
    cross = CrossAttentionSpec(num_heads, head_dim, dtypes.kv, num_positions, block_size_multiple=block_size_multiple)
    specs: dict[str, KVCacheSpec] = {}
    for index in range(c.num_layers("decoder_layers")):
        layer = f"model.decoder.layers.{index}"
        specs |= {f"{layer}.self_attn": own, f"{layer}.encoder_attn": cross}
    return specs


def max_model_len(config: Mapping[str, Any]) -> int:
    """Return the model's own length limit in tokens: of the decoder."""
    return Fields(config, DEFAULTS).whole("max_target_positions")


def _layer(layer: str, width: int, mlp_width: int, attentions: tuple[str, ...]) -> _shapes.Shapes:
    """Yield (tensor name, shape) of a layer with these attentions, each with a norm before it; keys have no bias."""
    for attention in attentions:
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            yield from _shapes.linear(f"{layer}.{attention}.{name}", width, width, bias=name != "k_proj")
        yield from _norm(f"{layer}.{attention}_layer_norm", width)
    yield from _shapes.linear(f"{layer}.fc1", mlp_width, width, bias=True)
    yield from _shapes.linear(f"{layer}.fc2", width, mlp_width, bias=True)
    yield from _norm(f"{layer}.final_layer_norm", width)


def _norm(module: str, width: int) -> _shapes.Shapes:
    yield f"{module}.weight", (width,)
    yield f"{module}.bias", (width,)
