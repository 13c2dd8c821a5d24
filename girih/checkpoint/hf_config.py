"""The small JSON files of a Hugging Face directory: config.json, and what ends a sequence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from girih.errors import CheckpointError


def load_config(directory: Path) -> dict[str, Any]:
    """Read config.json.

    Args:
        directory: a Hugging Face model directory.

    Returns:
        Its fields; "model_type" is a string.

    Raises:
        CheckpointError: no such file, not a JSON object, or without "model_type".
    """
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{directory} has no config.json; a Hugging Face model directory is needed")
    return check_config(read_json_object(path), str(path))


def check_config(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a config.json that says which architecture it is of.

    Args:
        config: its fields.
        where: it comes from, for the message.

    Raises:
        CheckpointError: there is no "model_type".
    """
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(f'{where} has no "model_type"; without it the architecture is not known')
    return config


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Return the tokens that end a sequence; the one place that says so.

    They come from generation_config.json, else from config.json, else they are the tokenizer's end-of-sequence token,
    else there is none.

    Raises:
        CheckpointError: a file cannot be read, or its "eos_token_id" is no token id nor a list of them.
    """
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if not path.is_file():
            continue
        value = read_json_object(path).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int and i >= 0 for i in ids):
            raise CheckpointError(f'{path}: "eos_token_id" must be a token id or a list of them, not {value!r}')
        return tuple(dict.fromkeys(ids))
    return _eos_of_tokenizer(directory)


def token_text(value: Any) -> str | None:
    """Return a special token's text as tokenizer_config.json writes it: a string, or an object with "content"."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _eos_of_tokenizer(directory: Path) -> tuple[int, ...]:
    """Return the id of the token that tokenizer_config.json names, if tokenizer.json lists it as an added token."""
    paths = directory / "tokenizer_config.json", directory / "tokenizer.json"
    if not all(path.is_file() for path in paths):
        return ()
    text = token_text(read_json_object(paths[0]).get("eos_token"))
    if text is None:
        return ()
    added = read_json_object(paths[1]).get("added_tokens") or []
    return tuple(token["id"] for token in added if token.get("content") == text)


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        CheckpointError: the file cannot be read or holds something else; the message names it.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    return parse_json_object(text, str(path))


def parse_json_object(text: str | bytes, where: str) -> dict[str, Any]:
    """Read one JSON object.

    Args:
        text: of the object.
        where: it comes from, for the message.

    Raises:
        CheckpointError: the text is not valid JSON or holds something else.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} must hold a JSON object, not {type(value).__name__}")
    return value
