"""Hyper-parameters that every decoder which can run has: `DecoderConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from girih.arch._attention import read_heads
from girih.arch._common import check_heads
from girih.arch._fields import Fields


@dataclass(frozen=True)
class DecoderConfig:
    """Hyper-parameters under the names of config.json; what is missing there has Hugging Face's default.

    Args:
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP.
        num_hidden_layers: decoder layers.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads.
        head_dim: elements of a head.
        max_position_embeddings: the model's own length limit in tokens.
        rms_norm_eps: added to the mean square in norms.
        tie_word_embeddings: the output layer is the embedding.
        attention_bias: the q, k, v and o projections have a bias.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool


def decoder_fields(c: Fields) -> dict[str, Any]:
    """Read the fields of `DecoderConfig`, as keyword arguments of a class made from it.

    Raises:
        ConfigError: a field that is wrong, or heads that rotary embeddings cannot use; the message names it.
    """
    heads = read_heads(c)
    check_heads(*heads)
    return {
        "vocab_size": c.whole("vocab_size"),
        "hidden_size": c.whole("hidden_size"),
        "intermediate_size": c.whole("intermediate_size"),
        "num_hidden_layers": c.num_layers(),
        "num_attention_heads": heads.num_heads,
        "num_key_value_heads": heads.num_kv_heads,
        "head_dim": heads.head_dim,
        "max_position_embeddings": c.whole("max_position_embeddings"),
        "rms_norm_eps": c.number("rms_norm_eps"),
        "tie_word_embeddings": c.flag("tie_word_embeddings"),
        "attention_bias": c.flag("attention_bias"),
    }
