"""Dequantising to bfloat16: every type of the gguf library, in pieces, in any row order."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import _type_traits
from safetensors import safe_open
from tiny_gguf import write_gguf

from girih.checkpoint import gguf_weights
from girih.checkpoint.gguf_families._common import WeightRule
from girih.checkpoint.gguf_reader import GgufFile, read_gguf
from girih.checkpoint.gguf_weights import bfloat16_pieces, check_complete, to_bfloat16, write_weights
from girih.checkpoint.progress import no_progress
from girih.errors import CheckpointError

NUM_ROWS = 6


def model_with(tmp_path: Path, **tensors: object) -> GgufFile:
    path = tmp_path / "model.gguf"
    write_gguf(path, {"general.architecture": "llama"}, tensors)
    return read_gguf(path)


def all_pieces(model: GgufFile, rule: WeightRule) -> np.ndarray:
    return np.concatenate(list(bfloat16_pieces(model, rule)))


def rounded(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values.reshape(-1)).to(torch.bfloat16).view(torch.uint16).numpy()


@pytest.mark.parametrize("kind", [*_type_traits, gguf.GGMLQuantizationType.F16], ids=lambda kind: kind.name)
def test_every_type_that_the_library_dequantises_becomes_the_nearest_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: gguf.GGMLQuantizationType
) -> None:
    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    # bytes below 0x3C make no scale infinite, whatever float type it has
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 0x3C, (NUM_ROWS, num_bytes * 256 // elements), np.uint8)
    model = model_with(tmp_path, x=(kind, rows))
    expected = gguf.dequantize(rows, kind)
    assert expected.shape == (NUM_ROWS, 256)
    order = np.array([5, 0, 3, 1, 4, 2])
    for piece_elements in (1, 600, 1 << 20):
        monkeypatch.setattr(gguf_weights, "PIECE_ELEMENTS", piece_elements)
        assert np.array_equal(all_pieces(model, WeightRule("x", "y")), rounded(expected))
        moved = all_pieces(model, WeightRule("x", "y", row_order=order, offset=-1.0))
        assert np.array_equal(moved, rounded(expected[order] - np.float32(1)))


def test_rounding_is_to_nearest_with_ties_to_even_as_torch_does_it() -> None:
    bits = np.arange(0, 2**32, 9973, dtype=np.uint32)
    ties = np.arange(0, 2**16, dtype=np.uint32) << 16 | 0x8000
    values = np.concatenate([bits, ties]).view(np.float32)
    values = values[np.isfinite(values)]
    assert np.array_equal(to_bfloat16(values), rounded(values))


def test_a_vector_is_reordered_by_element(tmp_path: Path) -> None:
    model = model_with(tmp_path, x=np.arange(4, dtype=np.float32))
    pieces = all_pieces(model, WeightRule("x", "y", row_order=np.array([2, 0, 3, 1])))
    assert np.array_equal(pieces, rounded(np.array([2, 0, 3, 1], np.float32)))


def test_a_row_order_of_another_length_is_refused(tmp_path: Path) -> None:
    model = model_with(tmp_path, x=np.zeros((4, 2), np.float32))
    with pytest.raises(CheckpointError, match="'x' has 4 rows, the metadata says 6"):
        all_pieces(model, WeightRule("x", "y", row_order=np.arange(6)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    model = model_with(tmp_path, x=np.array([[0, value]], np.float32))
    with pytest.raises(CheckpointError, match="'x' holds values that are not finite"):
        all_pieces(model, WeightRule("x", "y"))


def test_a_type_that_the_library_cannot_dequantise_is_named(tmp_path: Path) -> None:
    model = model_with(tmp_path, x=np.zeros((2, 4), np.int32))
    with pytest.raises(CheckpointError, match="'x' has type I32"):
        all_pieces(model, WeightRule("x", "y"))


def test_the_file_written_is_what_safetensors_reads(tmp_path: Path) -> None:
    matrix, vector = np.arange(12, dtype=np.float32).reshape(3, 4), np.arange(3, dtype=np.float32)
    model = model_with(tmp_path, m=matrix, v=vector)
    seen: list[tuple[int, int]] = []
    rules = [WeightRule("v", "model.v", offset=1.0), WeightRule("m", "model.m")]
    write_weights(model, rules, tmp_path / "out.safetensors", lambda stage, done, total: seen.append((done, total)))
    with safe_open(tmp_path / "out.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert torch.equal(file.get_tensor("model.m"), torch.from_numpy(matrix).to(torch.bfloat16))
        assert torch.equal(file.get_tensor("model.v"), torch.from_numpy(vector + 1).to(torch.bfloat16))
    assert seen == [(6, 30), (30, 30)]
    header_bytes = int.from_bytes((tmp_path / "out.safetensors").read_bytes()[:8], "little")
    assert header_bytes % 8 == 0  # data that is mapped must be aligned
    json.loads((tmp_path / "out.safetensors").read_bytes()[8 : 8 + header_bytes])


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    model = model_with(tmp_path, a=np.zeros(2, np.float32), rope=np.zeros(2, np.float32))
    check_complete(model, [WeightRule("a", "x")], frozenset({"rope"}))
    with pytest.raises(CheckpointError, match="tensors unknown to the architecture 'llama': rope"):
        check_complete(model, [WeightRule("a", "x")], frozenset())
    with pytest.raises(CheckpointError, match="missing tensors: b, c"):
        check_complete(model, [WeightRule(name, name) for name in ("a", "c", "b")], frozenset({"rope"}))


def test_pieces_bound_the_memory(tmp_path: Path) -> None:
    model = model_with(tmp_path, x=np.zeros((100, 64), np.float32))
    assert all(piece.size <= gguf_weights.PIECE_ELEMENTS for piece in bfloat16_pieces(model, WeightRule("x", "y")))
    write_weights(model, [WeightRule("x", "y")], tmp_path / "x.safetensors", no_progress)
