"""GGUF headers: what they hold, and every way in which they can lie about it."""

import contextlib
import os
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_gguf import write_gguf

from girih.checkpoint.gguf_reader import read_gguf
from girih.errors import CheckpointError

METADATA = {
    "general.architecture": "llama",
    "a.bool": True,
    "an.int": 7,
    "a.float": 1e-5,
    "a.text": "né\n",
    "some.texts": ["a", "", "日本"],
    "some.ints": [1, 2, 3],
    "some.floats": [0.5, -1.0],
}
TENSORS = {
    "matrix": np.arange(64, dtype=np.float32).reshape(2, 32),
    "vector": np.arange(5, dtype=np.float32),
    "packed": (gguf.GGMLQuantizationType.Q8_0, np.arange(3 * 34, dtype=np.uint8).reshape(3, 34)),
}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    write_gguf(path, METADATA, TENSORS)
    return path


def header(num_tensors: int = 0, num_metadata: int = 0, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, num_tensors, num_metadata)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def tensor(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def refusal(tmp_path: Path, content: bytes, name: str = "bad.gguf") -> str:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_metadata_and_tensors_come_back_as_written(small: Path) -> None:
    model = read_gguf(small)
    assert model.architecture == "llama"
    assert model.flag("a.bool") is True
    assert model.integer("an.int") == 7
    assert model.number("a.float") == 1e-5  # not 9.999999747378752e-06, its value as float32
    assert model.text("a.text") == "né\n"
    assert model.strings("some.texts") == ["a", "", "日本"]
    assert model.numbers("some.ints").tolist() == [1, 2, 3]
    assert model.numbers("some.floats").tolist() == [0.5, -1.0]
    assert model.tensors["matrix"].shape == (2, 32)
    assert np.array_equal(model.tensors["matrix"].data.view(np.float32), TENSORS["matrix"])
    assert model.tensors["vector"].shape == (5,)
    assert model.tensors["packed"].shape == (3, 32)
    assert model.tensors["packed"].type_name == "Q8_0"
    assert np.array_equal(model.tensors["packed"].data, TENSORS["packed"][1])


def test_it_agrees_with_the_gguf_library(small: Path) -> None:
    ours, theirs = read_gguf(small), gguf.GGUFReader(small)
    assert {t.name: (t.tensor_type.name, bytes(t.data.tobytes())) for t in theirs.tensors} == {
        t.name: (t.type_name, t.data.tobytes()) for t in ours.tensors.values()
    }


def test_a_missing_or_mistyped_key_is_named(small: Path) -> None:
    model = read_gguf(small)
    with pytest.raises(CheckpointError, match=r"no 'llama\.block_count'"):
        model.integer("llama.block_count")
    for read, key in ((model.integer, "a.text"), (model.integer, "a.bool"), (model.text, "an.int")):
        with pytest.raises(CheckpointError, match=f"'{key}' must be"):
            read(key)
    assert model.integer("llama.block_count", 3) == 3


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        ((2**63 - 1, 2), "truncated or damaged"),
        ((2**62, 2**62, 2**62, 2**62), "truncated or damaged"),
        ((2**42 + 1,), "truncated or damaged"),
        ((2**64 - 1,), "truncated or damaged"),
        ((0, 4), "is empty"),
        ((), "0 dimensions"),
        ((1, 1, 1, 1, 1), "5 dimensions"),
    ],
)
def test_dimensions_that_the_file_cannot_hold_are_refused(tmp_path: Path, dims: tuple[int, ...], words: str) -> None:
    # case 123
    assert words in refusal(tmp_path, header(1) + tensor("huge", dims) + bytes(64))


@pytest.mark.parametrize("count", [2**61, 2**64 - 1, 10**6])
def test_counts_that_the_file_cannot_hold_are_refused_before_anything_is_allocated(tmp_path: Path, count: int) -> None:
    # case 123
    assert str(count) in refusal(tmp_path, header(num_tensors=count) + bytes(64))
    assert str(count) in refusal(tmp_path, header(num_metadata=count) + bytes(64))
    for kind in (8, 6):  # arrays of strings, of floats
        array = header(num_metadata=1) + text("k") + struct.pack("<IIQ", 9, kind, count) + bytes(64)
        assert "truncated or damaged" in refusal(tmp_path, array)
    assert "runs past the end" in refusal(tmp_path, header(num_metadata=1) + struct.pack("<Q", count) + bytes(64))


def test_a_string_of_an_array_that_is_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    for length in (100, 2**63, 2**64 - 1):
        array = struct.pack("<IIQ", 9, 8, 3) + text("a") + struct.pack("<Q", length) + bytes(32)
        assert "'k' of 3 strings" in refusal(tmp_path, header(num_metadata=1) + text("k") + array)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "0 bytes long"),
        (b"GGUF\3\0\0", "7 bytes long"),
        (header(magic=b"GGML"), "not a GGUF file"),
        (b"PK\3\4" + bytes(60), "not a GGUF file"),
        (header(version=1), "version 1"),
        (header(version=4), "version 4"),
        (header(version=0x03000000), "big-endian"),
        (header(1) + tensor("x", (4,), kind=999) + bytes(64), "unknown type number 999"),
        (header(1) + tensor("x", (33,), kind=8) + bytes(64), "rows of 33 elements"),
        (header(1) + tensor("x", (4,), offset=7) + bytes(64), "truncated or damaged"),
        (header(2) + tensor("x", (4,)) * 2 + bytes(64), "two tensors are called 'x'"),
        (header(0, 1) + text("k") + struct.pack("<I", 77) + bytes(64), "unknown type number 77"),
        (header(0, 1) + text("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(64), "no known model uses"),
        (header(0, 1) + text("general.alignment") + struct.pack("<II", 4, 3) + bytes(64), "power of two"),
        (header(0, 1) + text("k") + struct.pack("<IQ", 8, 2) + b"\xff\xff" + bytes(64), "not UTF-8"),
    ],
)
def test_a_damaged_or_foreign_file_is_explained_in_one_line(tmp_path: Path, content: bytes, words: str) -> None:
    assert words in refusal(tmp_path, content)


def test_a_big_endian_file_is_refused_by_that_name(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    write_gguf(path, METADATA, {}, endianess=gguf.GGUFEndian.BIG)
    with pytest.raises(CheckpointError, match="big-endian"):
        read_gguf(path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path, small: Path) -> None:
    content = small.read_bytes()
    last = read_gguf(small).tensors["packed"]
    end = content.rindex(last.data.tobytes()) + last.data.nbytes  # the rest is padding
    for length in range(end):
        refusal(tmp_path, content[:length])


@settings(max_examples=300, deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4))
def test_any_damage_gives_a_model_or_a_refusal(tmp_path_factory: pytest.TempPathFactory, edits: list) -> None:
    folder = tmp_path_factory.getbasetemp()
    if not (folder / "sound.gguf").exists():
        write_gguf(folder / "sound.gguf", METADATA, TENSORS)
    content = bytearray((folder / "sound.gguf").read_bytes())
    for position, value in edits:
        content[position % len(content)] = value
    (folder / "damaged.gguf").write_bytes(content)
    with contextlib.suppress(CheckpointError):
        read_gguf(folder / "damaged.gguf")


def test_a_vocabulary_of_262144_is_read_quickly_and_without_touching_tensor_data(tmp_path: Path) -> None:  # case 107
    path = tmp_path / "big.gguf"
    count, data_bytes = 262_144, 1 << 33
    words = b"".join(text(f"token{i}") for i in range(count))
    with open(path, "wb") as file:
        file.write(header(1, 1) + text("tokens") + struct.pack("<IIQ", 9, 8, count) + words)
        file.write(tensor("weights", (data_bytes // 4,)))
        os.truncate(path, file.tell() + data_bytes + 64)  # a hole: 8 GiB that are nowhere
    start_s = time.perf_counter()
    read_gguf(path)
    taken_s = time.perf_counter() - start_s
    tracemalloc.start()
    model = read_gguf(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert model.strings("tokens")[-1] == f"token{count - 1}"
    assert model.tensors["weights"].data.nbytes == data_bytes
    assert taken_s < 5
    assert peak_bytes < 100 << 20


@pytest.fixture
def split(tmp_path: Path) -> list[Path]:
    write_gguf(tmp_path / "model.gguf", METADATA, TENSORS, split_max_tensors=1)
    return sorted(tmp_path.glob("model-*.gguf"))


def test_all_parts_of_a_split_model_are_read_whichever_is_given(split: list[Path]) -> None:  # case 125
    assert [path.name for path in split] == [f"model-0000{k}-of-00003.gguf" for k in (1, 2, 3)]
    for path in split:
        model = read_gguf(path)
        assert model.tensors.keys() == TENSORS.keys()
        assert model.integer("an.int") == 7
        assert model.path == split[0]


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_missing_part_is_named(split: list[Path], missing: int) -> None:  # case 125
    split[missing - 1].unlink()
    present = split[missing % 3]
    with pytest.raises(CheckpointError, match=rf"part {missing} is missing.*0000{missing}-of-00003"):
        read_gguf(present)


def test_a_renamed_or_impossible_part_is_explained(split: list[Path]) -> None:
    lone = split[0].rename(split[0].with_name("renamed.gguf"))
    with pytest.raises(CheckpointError, match="split in 3 files"):
        read_gguf(lone)
    with pytest.raises(CheckpointError, match="part 4 of 3 cannot be"):
        read_gguf(split[1].with_name("model-00004-of-00003.gguf"))


def test_parts_that_do_not_belong_together_are_refused(split: list[Path]) -> None:
    split[2].write_bytes(split[1].read_bytes())
    with pytest.raises(CheckpointError, match="in another part of the model"):
        read_gguf(split[0])
