"""config.json and generation_config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from girih.checkpoint.hf_config import eos_token_ids, load_config
from girih.errors import CheckpointError


def write(directory: Path, name: str, value: Any) -> None:
    (directory / name).write_text(value if isinstance(value, str) else json.dumps(value))


def test_the_config_is_read(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"model_type": "llama", "x": 1})
    assert load_config(tmp_path) == {"model_type": "llama", "x": 1}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "has no config.json"),
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "must hold a JSON object, not list"),
        ("{}", 'no "model_type"'),
        ('{"model_type": 3}', 'no "model_type"'),
    ],
)
def test_a_config_that_cannot_be_used_is_explained(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        write(tmp_path, "config.json", content)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_config(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [1, 106, 1]}, {"eos_token_id": 9}, (1, 106)),
        ({"eos_token_id": 0}, {"eos_token_id": 9}, (0,)),
        ({}, {"eos_token_id": 9}, (9,)),
        (None, {"eos_token_id": [9]}, (9,)),
        (None, {}, ()),
        (None, None, ()),
    ],
)
def test_the_generation_config_decides_what_ends_a_sequence(
    tmp_path: Path, generation: Any, config: Any, expected: tuple[int, ...]
) -> None:
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        if value is not None:
            write(tmp_path, name, value)
    assert eos_token_ids(tmp_path) == expected


@pytest.mark.parametrize("value", ["</s>", -1, [1, "x"], True, {"a": 1}])
def test_an_end_that_is_no_token_id_is_refused(tmp_path: Path, value: Any) -> None:
    write(tmp_path, "generation_config.json", {"eos_token_id": value})
    with pytest.raises(CheckpointError, match="must be a token id or a list"):
        eos_token_ids(tmp_path)
