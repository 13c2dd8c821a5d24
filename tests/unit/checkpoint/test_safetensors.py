"""Headers of safetensors files, and everything that is not one."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from girih.checkpoint.safetensors import check_weights, has_weights, open_weights, read_header
from girih.errors import CheckpointError

TENSORS = {
    "a.weight": np.arange(2000, dtype=np.float32).reshape(40, 50),
    "b.weight": np.arange(6, dtype=np.float16),
    "c.count": np.array(3, dtype=np.int64),
}


def save_sharded(directory: Path) -> dict[str, str]:
    """Write a model in two files with an index; return its weight map."""
    shards = {
        "model-00001-of-00002.safetensors": ["a.weight"],
        "model-00002-of-00002.safetensors": ["b.weight", "c.count"],
    }
    for file, names in shards.items():
        save_file({name: TENSORS[name] for name in names}, directory / file)
    weight_map = {name: file for file, names in shards.items() for name in names}
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: Any) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_weights(directory)
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def with_header(path: Path, header: Any, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def test_one_file_gives_every_tensor_its_place(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    index = open_weights(tmp_path)
    assert {name: (info.dtype, info.shape) for name, info in index.items()} == {
        "a.weight": ("float32", (40, 50)),
        "b.weight": ("float16", (6,)),
        "c.count": ("int64", ()),
    }
    assert all(info.file == tmp_path / "model.safetensors" for info in index.values())
    assert index.weight_bytes == sum(value.nbytes for value in TENSORS.values())


def test_shards_are_joined_by_the_index(tmp_path: Path) -> None:
    weight_map = save_sharded(tmp_path)
    index = open_weights(tmp_path)
    assert {name: info.file.name for name, info in index.items()} == weight_map
    assert index.weight_bytes == sum(value.nbytes for value in TENSORS.values())


def test_a_listed_shard_that_is_not_there_is_named(tmp_path: Path) -> None:  # case 119
    save_sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "lists model-00002-of-00002.safetensors, which is not there" in refusal(tmp_path)


def test_files_and_tensors_that_the_index_does_not_list_are_ignored(tmp_path: Path) -> None:  # case 119
    save_sharded(tmp_path)
    save_file({"a.weight": np.zeros(3)}, tmp_path / "consolidated.safetensors")
    write_index(
        tmp_path, {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}
    )
    index = open_weights(tmp_path)
    assert sorted(index) == ["a.weight", "b.weight"]
    assert index["a.weight"].shape == (40, 50)


def test_a_tensor_that_is_not_in_its_shard_is_named(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    write_index(tmp_path, {"z": "model-00001-of-00002.safetensors"})
    assert "'z' is in model-00001-of-00002.safetensors, but it is not" in refusal(tmp_path)


@pytest.mark.parametrize("weight_map", [None, {}, [], {"a": 3}])
def test_an_index_without_a_weight_map_is_refused(tmp_path: Path, weight_map: Any) -> None:
    write_index(tmp_path, weight_map)
    assert 'no "weight_map"' in refusal(tmp_path)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "sub/x.safetensors", ".."])
def test_an_index_reaches_no_file_outside_its_directory(tmp_path: Path, name: str) -> None:
    write_index(tmp_path, {"a": name})
    assert "only files beside the index are read" in refusal(tmp_path)


@pytest.mark.parametrize("cut", [1, 4096])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_file_cut_short_is_refused(tmp_path: Path, cut: int, sharded: bool) -> None:  # case 120
    path = tmp_path / ("model-00001-of-00002.safetensors" if sharded else "model.safetensors")
    if sharded:
        save_sharded(tmp_path)
    else:
        save_file(TENSORS, path)
    content = path.read_bytes()
    path.write_bytes(content[:-cut])
    message = refusal(tmp_path)
    assert f"{path} is truncated" in message
    assert f"{len(content)} bytes, the file has {len(content) - cut}" in message


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    save_file({"x": np.zeros(3, np.float32)}, tmp_path / "whole.safetensors")
    content = (tmp_path / "whole.safetensors").read_bytes()
    for length in range(len(content)):
        (tmp_path / "model.safetensors").write_bytes(content[:length])
        refusal(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content + b"x")
    assert "followed by something else" in refusal(tmp_path)


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 535823360\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (LFS_POINTER, "Git LFS pointer"),
        (b"", "is empty"),
        (b"version", "the file has 7 bytes"),
        ((2**63).to_bytes(8, "little") + b"{}", f"a header of {2**63} bytes is claimed"),
        ((2**64 - 1).to_bytes(8, "little"), f"a header of {2**64 - 1} bytes is claimed"),
        (b"PK\x03\x04" + bytes(60), "not a safetensors file"),
        (pickle.dumps({"x": [1.0] * 50}), "not a safetensors file"),
        (b"<!DOCTYPE html><html>" + b" " * 99, "not a safetensors file"),
        (bytes(64), "its header is not JSON"),
    ],
)
def test_what_is_no_safetensors_file_is_called_what_it_is(tmp_path: Path, content: bytes, words: str) -> None:
    # case 121
    (tmp_path / "model.safetensors").write_bytes(content)
    assert words in refusal(tmp_path)


def entry(kind: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": kind, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ([], "not a JSON object"),
        (b"[" * 100_000, "not JSON"),
        ({"x": 3}, "entry for 'x' is malformed"),
        ({"x": {"dtype": "F32"}}, "entry for 'x' is malformed"),
        ({"x": entry(offsets=(0, 8, 9))}, "entry for 'x' is malformed"),
        ({"x": entry(kind="F4")}, "dtype 'F4'"),
        ({"x": entry(shape=(-2,))}, "not whole numbers"),
        ({"x": entry(shape=(2.0,))}, "not whole numbers"),
        ({"x": entry(shape=(True, 2))}, "not whole numbers"),
        ({"x": entry(offsets=(8, 0))}, "needs 8 bytes, its offsets span -8"),
        ({"x": entry(shape=(2**62, 2**62))}, f"needs {4 * 2**124} bytes"),
        ({"x": entry(), "y": entry(offsets=(4, 12))}, "'y' at byte 4 overlaps"),
        ({"x": entry(), "y": entry()}, "'y' at byte 0 overlaps"),
        ({"x": entry(), "y": entry(offsets=(9, 17))}, "'y' at byte 9 leaves a gap"),
        ({"x": entry(offsets=(1, 9))}, "'x' at byte 1 leaves a gap"),
    ],
)
def test_a_header_that_does_not_add_up_is_refused(tmp_path: Path, header: Any, words: str) -> None:
    with_header(tmp_path / "model.safetensors", header, bytes(17))
    assert words in refusal(tmp_path)


def test_empty_tensors_and_metadata_are_legal(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "x": entry(shape=(0, 3), offsets=(0, 0)), "y": entry()}
    assert sorted(read_header(with_header(tmp_path / "x.safetensors", header, bytes(8)))) == ["x", "y"]


@settings(max_examples=200, deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, 10**5), st.integers(0, 255)), min_size=1, max_size=4))
def test_any_damage_gives_an_index_or_a_refusal(tmp_path_factory: pytest.TempPathFactory, edits: list) -> None:
    folder = tmp_path_factory.getbasetemp()
    path = folder / "sound.safetensors"
    if not path.exists():
        save_file({"x": np.zeros(3, np.float32), "y": np.zeros((2, 2), np.float16)}, path)
    content = bytearray(path.read_bytes())
    for position, value in edits:
        content[position % len(content)] = value
    damaged = folder / "damaged.safetensors"
    damaged.write_bytes(content)
    try:
        index = read_header(damaged)
    except CheckpointError:
        return
    assert sum(info.num_bytes for info in index.values()) < len(content)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt"])
def test_pickled_weights_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(pickle.dumps({}))
    assert not has_weights(tmp_path)
    message = refusal(tmp_path)
    assert name in message
    assert "can run code" in message


def test_a_directory_without_weights_says_what_is_needed(tmp_path: Path) -> None:
    assert "no model.safetensors and no model.safetensors.index.json" in refusal(tmp_path)
    save_file(TENSORS, tmp_path / "part.safetensors")
    assert "part.safetensors, but neither" in refusal(tmp_path)


def test_weights_that_match_are_accepted_with_harmless_extras(tmp_path: Path) -> None:
    extras = {"lm_head.weight": np.zeros(2), "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2)}
    save_file(TENSORS | extras, tmp_path / "model.safetensors")
    check_weights(open_weights(tmp_path), {name: value.shape for name, value in TENSORS.items()})


def test_every_mismatch_is_named_in_one_line(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    expected = {"a.weight": (40, 51), "b.weight": (6,), **{f"layer.{i}": (1,) for i in range(6)}}
    with pytest.raises(CheckpointError) as caught:
        check_weights(open_weights(tmp_path), expected)
    message = str(caught.value)
    assert "\n" not in message
    assert "missing: layer.0, layer.1, layer.2, layer.3 and 2 more" in message
    assert "wrong shape: a.weight is [40, 50], config.json calls for [40, 51]" in message
    assert "not in the model: c.count" in message
