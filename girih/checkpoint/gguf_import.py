"""A GGUF file -> a Hugging Face directory: configs, tokenizer files, and weights as bfloat16 safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

from girih import plugins
from girih.checkpoint.gguf_reader import GgufFile, read_gguf
from girih.checkpoint.gguf_tokenizer import tokenizer_config, tokenizer_json
from girih.checkpoint.gguf_weights import check_complete, write_weights
from girih.checkpoint.progress import Progress
from girih.errors import CheckpointError, ConfigError

FAMILIES = "girih.checkpoint.gguf_families"


def import_gguf(path: Path, directory: Path, progress: Progress) -> None:
    """Write the model of a GGUF file into an empty directory, in Hugging Face's format.

    Args:
        path: the file; of a split model any part.
        directory: an existing directory; the caller makes its appearance atomic (`cache.staging`).
        progress: called as the work goes on.

    Raises:
        CheckpointError: the file is damaged, or holds a model that cannot be imported.
    """
    progress("reading the GGUF header", 0, 1)
    gguf = read_gguf(path)
    family = _family(gguf)
    config = family.hf_config(gguf)
    rules = family.weight_rules(gguf, config)
    check_complete(gguf, rules, family.CONFIG_TENSORS)
    progress("converting the tokenizer", 0, 1)
    _write_json(directory / "tokenizer.json", tokenizer_json(gguf), indent=None)
    _write_json(directory / "tokenizer_config.json", tokenizer_config(gguf, config["max_position_embeddings"]))
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", _generation_config(config))
    write_weights(gguf, rules, directory / "model.safetensors", progress)


def gguf_config(path: Path) -> dict[str, Any]:
    """Return the config.json that the import of a GGUF file would write; reads the header only.

    Raises:
        CheckpointError: the file is damaged, or holds a model that cannot be imported.
    """
    gguf = read_gguf(path)
    return _family(gguf).hf_config(gguf)


def _family(gguf: GgufFile) -> ModuleType:
    try:
        return plugins.load(FAMILIES, gguf.architecture, what="GGUF architecture")
    except ConfigError as error:
        raise CheckpointError(f"{gguf.path}: {error}") from None


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    fields = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {field: config[field] for field in fields if field in config}


def _write_json(path: Path, value: dict[str, Any], indent: int | None = 2) -> None:
    separators = (",", ":") if indent is None else None
    path.write_text(json.dumps(value, ensure_ascii=False, indent=indent, separators=separators) + "\n", "utf-8")
