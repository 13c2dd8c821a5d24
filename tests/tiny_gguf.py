"""Small GGUF files for tests, written with the gguf library; the models in them come from `tiny_models`.

write_gguf(path, {"general.architecture": "llama"}, {"token_embd.weight": array})
llama_gguf(tiny_llama(tmp_path), tmp_path / "model.gguf")
gemma3_gguf(tiny_gemma3(tmp_path), tmp_path / "model.gguf")
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

NORMAL, CONTROL = 1, 3

_LLAMA_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA3_NAMES = _LLAMA_NAMES | {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray], **options: Any) -> None:
    """Write metadata (bool, int, float, str and lists of them) and float32 tensors, in Q8_0 where a name says so.

    Args:
        path: the file to write.
        metadata: with "general.architecture".
        tensors: name -> float32 array, or (gguf type, uint8 rows).
        options: of `gguf.GGUFWriter`, e.g. endianess or split_max_tensors.
    """
    rest = dict(metadata)
    writer = gguf.GGUFWriter(path, rest.pop("general.architecture"), **options)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in rest.items():
        add.get(type(value), writer.add_array)(key, value)
    for name, value in tensors.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[1], raw_dtype=value[0])
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_gguf(directory: Path, path: Path, *, extra: Mapping[str, Any] | None = None, **options: Any) -> None:
    """Write a tiny llama as its converters do: Q and K rows of each head in rotary pairs.

    Args:
        directory: from `tiny_llama`.
        path: the file to write.
        extra: metadata to add or replace.
        options: of `gguf.GGUFWriter`.
    """
    config = json.loads((directory / "config.json").read_text())
    tensors = {}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, value in load_file(directory / "model.safetensors").items():
        count = heads.get(name.split(".")[-2])
        paired = value if count is None else _paired_rows(value, count)
        tensors[_gguf_name(name, _LLAMA_NAMES)] = paired.to(torch.float32).numpy()
    metadata = {**_metadata(directory, config, "llama"), "llama.rope.freq_base": 10000.0, **(extra or {})}
    write_gguf(path, metadata, tensors, **options)


def gemma3_gguf(directory: Path, path: Path, *, extra: Mapping[str, Any] | None = None, **options: Any) -> None:
    """Write a tiny gemma3_text as its converters do: one added to every norm weight.

    Args:
        directory: from `tiny_gemma3`.
        path: the file to write.
        extra: metadata to add or replace.
        options: of `gguf.GGUFWriter`.
    """
    config = json.loads((directory / "config.json").read_text())
    tensors = {
        _gguf_name(name, _GEMMA3_NAMES): (value + 1 if "norm" in name else value).to(torch.float32).numpy()
        for name, value in load_file(directory / "model.safetensors").items()
    }
    metadata = {
        **_metadata(directory, config, "gemma3"),
        "gemma3.rope.freq_base": 1000000.0,
        "gemma3.attention.sliding_window": config["sliding_window"],
        **(extra or {}),
    }
    write_gguf(path, metadata, tensors, **options)


def _paired_rows(value: torch.Tensor, num_heads: int) -> torch.Tensor:
    halves = value.reshape(num_heads, 2, value.shape[0] // num_heads // 2, *value.shape[1:])
    return halves.transpose(1, 2).reshape(value.shape)


def _gguf_name(name: str, layer_names: Mapping[str, str]) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in _OUTER_NAMES:
        return f"{_OUTER_NAMES[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{layer_names[inner]}.{kind}"


def _metadata(directory: Path, config: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return sizes, and the byte-level tokenizer of `tiny_models`, padded to the rows of the embedding."""
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    return {
        "general.architecture": prefix,
        f"{prefix}.block_count": config["num_hidden_layers"],
        f"{prefix}.context_length": config["max_position_embeddings"],
        f"{prefix}.embedding_length": config["hidden_size"],
        f"{prefix}.feed_forward_length": config["intermediate_size"],
        f"{prefix}.attention.head_count": config["num_attention_heads"],
        f"{prefix}.attention.head_count_kv": config["num_key_value_heads"],
        f"{prefix}.attention.key_length": config["head_dim"],
        f"{prefix}.attention.value_length": config["head_dim"],
        f"{prefix}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.padding_token_id": config["pad_token_id"],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.add_bos_token": tokenizer.get("post_processor") is not None
        and tokenizer["post_processor"]["type"] == "TemplateProcessing",
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }
