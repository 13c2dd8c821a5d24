"""What the families share: the rule for one tensor, and the metadata that every decoder has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from girih.checkpoint.gguf_reader import GgufFile
from girih.errors import CheckpointError


@dataclass(frozen=True)
class WeightRule:
    """How one Hugging Face tensor comes from one GGUF tensor.

    Args:
        source: GGUF name.
        target: Hugging Face name.
        row_order: int64 [rows]; output row i is source row row_order[i]. None keeps the order.
        offset: added to every element.
    """

    source: str
    target: str
    row_order: np.ndarray | None = None
    offset: float = 0.0


def base_config(gguf: GgufFile, architecture_class: str, model_type: str) -> dict[str, Any]:
    """Read the part of the config that is the same in every family.

    Args:
        gguf: the model.
        architecture_class: for "architectures", e.g. "LlamaForCausalLM".
        model_type: Hugging Face model type, e.g. "llama".

    Returns:
        Fields of config.json.

    Raises:
        CheckpointError: a size is missing, absurd, or differs between layers.
    """
    prefix = gguf.architecture
    num_layers = gguf.integer(f"{prefix}.block_count")
    if not 1 <= num_layers <= len(gguf.tensors):
        raise CheckpointError(f"{gguf.path}: {num_layers} layers cannot come from {len(gguf.tensors)} tensors")
    if experts := gguf.integer(f"{prefix}.expert_count", 0):
        raise CheckpointError(f"{gguf.path}: a mixture of {experts} experts; only dense models can be imported")
    num_heads = gguf.integer(f"{prefix}.attention.head_count")
    hidden_size = gguf.integer(f"{prefix}.embedding_length")
    if num_heads < 1 or hidden_size < 1:
        raise CheckpointError(f"{gguf.path}: {num_heads} heads and {hidden_size} hidden elements cannot be")
    num_kv_heads = gguf.integer(f"{prefix}.attention.head_count_kv", num_heads)
    head_dim = _head_dim(gguf, hidden_size // num_heads)
    _check_projection(gguf, "attn_q", num_heads, head_dim)
    _check_projection(gguf, "attn_k", num_kv_heads, head_dim)
    return {
        "architectures": [architecture_class],
        "model_type": model_type,
        "dtype": "bfloat16",
        "vocab_size": _vocab_size(gguf),
        "hidden_size": hidden_size,
        "intermediate_size": gguf.integer(f"{prefix}.feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": gguf.integer(f"{prefix}.context_length"),
        "rms_norm_eps": gguf.number(f"{prefix}.attention.layer_norm_rms_epsilon"),
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        **special_token_ids(gguf),
    }


def special_token_ids(gguf: GgufFile) -> dict[str, Any]:
    """Return bos_token_id, eos_token_id (a list when a turn can end in more ways) and pad_token_id, where stated."""
    prefix = "tokenizer.ggml."
    ids: dict[str, Any] = {
        field: gguf.integer(f"{prefix}{key}")
        for field, key in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id"))
        if f"{prefix}{key}" in gguf.metadata
    }
    # end of sequence, of turn, of message
    names = (f"{prefix}{name}_token_id" for name in ("eos", "eot", "eom"))
    ends = list(dict.fromkeys(gguf.integer(name) for name in names if name in gguf.metadata))
    if ends:
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return ids


def rope_parameters(gguf: GgufFile, default_theta: float) -> dict[str, Any]:
    """Read the rotary embedding of the (full attention) layers.

    Raises:
        CheckpointError: a scaling that is neither "none" nor "linear".
    """
    prefix = gguf.architecture
    theta = gguf.number(f"{prefix}.rope.freq_base", default_theta)
    scaling = gguf.text(f"{prefix}.rope.scaling.type", "none")
    if scaling == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if scaling == "linear":
        factor = gguf.number(f"{prefix}.rope.scaling.factor")
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    raise CheckpointError(f"{gguf.path}: rope scaling {scaling!r} cannot be imported; none and linear can")


def layer_rules(layer: int, names: dict[str, str]) -> list[WeightRule]:
    """Make plain rules for the weights of one layer.

    Args:
        layer: index of the layer.
        names: GGUF name -> Hugging Face name, both without the layer's prefix and ".weight".
    """
    return [
        WeightRule(f"blk.{layer}.{source}.weight", f"model.layers.{layer}.{target}.weight")
        for source, target in names.items()
    ]


def _vocab_size(gguf: GgufFile) -> int:
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{gguf.path}: there is no tensor 'token_embd.weight'; is it a language model?")
    num_tokens = len(gguf.strings("tokenizer.ggml.tokens"))
    if num_tokens > embedding.shape[0]:
        raise CheckpointError(f"{gguf.path}: {num_tokens} tokens, but {embedding.shape[0]} rows of embeddings")
    return embedding.shape[0]


def _head_dim(gguf: GgufFile, default: int) -> int:
    prefix = gguf.architecture
    head_dim = gguf.integer(f"{prefix}.attention.key_length", default)
    others = {
        "attention.value_length": gguf.integer(f"{prefix}.attention.value_length", head_dim),
        "rope.dimension_count": gguf.integer(f"{prefix}.rope.dimension_count", head_dim),
    }
    for name, value in others.items():
        if value != head_dim:
            raise CheckpointError(f"{gguf.path}: {name} is {value}, but a head has {head_dim}; this cannot be imported")
    if head_dim < 2 or head_dim % 2:
        raise CheckpointError(f"{gguf.path}: heads of {head_dim} elements cannot be rotated in pairs")
    return head_dim


def _check_projection(gguf: GgufFile, name: str, num_heads: int, head_dim: int) -> None:
    """Check the head counts of the metadata against the first layer, before anything is sized by them."""
    tensor = gguf.tensors.get(f"blk.0.{name}.weight")
    if tensor is None:
        raise CheckpointError(f"{gguf.path}: there is no tensor 'blk.0.{name}.weight'; the file is incomplete")
    if tensor.shape[0] != num_heads * head_dim:
        raise CheckpointError(
            f"{gguf.path}: 'blk.0.{name}.weight' has {tensor.shape[0]} rows, but the metadata says "
            f"{num_heads} heads of {head_dim}"
        )
