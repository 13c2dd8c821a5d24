"""Dequantise GGUF tensors to bfloat16 and write them as one safetensors file, a piece at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from girih.checkpoint.gguf_families._common import WeightRule
from girih.checkpoint.gguf_reader import GgufFile, GgufTensor
from girih.checkpoint.progress import Progress
from girih.checkpoint.safetensors import some_of
from girih.errors import CheckpointError

# elements dequantised at once: the temporaries of a piece stay in the processor's cache
PIECE_ELEMENTS = 1 << 17


def write_weights(gguf: GgufFile, rules: Sequence[WeightRule], path: Path, progress: Progress) -> None:
    """Write the Hugging Face tensors of `rules` to a safetensors file in bfloat16.

    Args:
        gguf: the source.
        rules: one per output tensor.
        path: the file to write.
        progress: called after each tensor.

    Raises:
        CheckpointError: a tensor has a type that cannot be dequantised, or values that are not finite.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for rule in rules:
        shape = gguf.tensors[rule.source].shape
        start, end = end, end + 2 * math.prod(shape)
        header[rule.target] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    done = 0
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for rule in rules:
            for piece in bfloat16_pieces(gguf, rule):
                file.write(piece.data)
                done += piece.nbytes
            progress("converting weights to bfloat16", done, end)


def check_complete(gguf: GgufFile, rules: Sequence[WeightRule], config_tensors: frozenset[str]) -> None:
    """Check that the rules use every tensor and that every tensor they use is there.

    Args:
        gguf: the source.
        rules: one per output tensor.
        config_tensors: GGUF names that became part of the config instead.

    Raises:
        CheckpointError: the message names those that are missing and those nothing is known about.
    """
    sources = {rule.source for rule in rules}
    missing = sorted(sources - gguf.tensors.keys())
    unknown = sorted(gguf.tensors.keys() - sources - config_tensors)
    if missing:
        raise CheckpointError(f"{gguf.path}: missing tensors: {some_of(missing)}; the file is incomplete")
    if unknown:
        raise CheckpointError(
            f"{gguf.path}: tensors unknown to the architecture {gguf.architecture!r}: {some_of(unknown)}; "
            "this model differs from what Girih can run"
        )


def bfloat16_pieces(gguf: GgufFile, rule: WeightRule) -> Iterator[np.ndarray]:
    """Give one output tensor in pieces, in order.

    Yields:
        uint16 [n]: bfloat16 bit patterns.
    """
    tensor = gguf.tensors[rule.source]
    rows = _ordered_rows(gguf, tensor, rule)
    dequantize = _dequantizer(gguf, tensor)
    elements_per_row = math.prod(tensor.shape) // len(rows)
    step = max(1, PIECE_ELEMENTS // elements_per_row)
    for start in range(0, len(rows), step):
        values = dequantize(rows[start : start + step])
        if not np.isfinite(values).all():
            raise CheckpointError(f"{gguf.path}: tensor {tensor.name!r} holds values that are not finite numbers")
        yield to_bfloat16(values + np.float32(rule.offset) if rule.offset else values)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round finite float32 values to bfloat16, ties to even.

    Args:
        values: float32 [n].

    Returns:
        uint16 [n]: the upper halves of the rounded float32 patterns.
    """
    bits = values.view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)


def _ordered_rows(gguf: GgufFile, tensor: GgufTensor, rule: WeightRule) -> np.ndarray:
    """Return the tensor's rows, still quantised, in output order; a vector's rows are its elements."""
    rows = tensor.data
    if rule.row_order is None:
        return rows
    if len(tensor.shape) == 1 and tensor.type_name == "F32":
        rows = rows.reshape(-1, 4)
    if len(rows) != len(rule.row_order):
        raise CheckpointError(
            f"{gguf.path}: tensor {tensor.name!r} has {len(rows)} rows, the metadata says {len(rule.row_order)}"
        )
    return rows[rule.row_order]


def _dequantizer(gguf: GgufFile, tensor: GgufTensor) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from uint8 [rows, row_bytes] to float32 [rows * elements]."""
    from gguf import GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType[tensor.type_name]

    def run(rows: np.ndarray) -> np.ndarray:
        # one long row: blocks are independent, and the library handles few long rows faster than many short ones
        return dequantize(np.ascontiguousarray(rows).reshape(1, -1), kind).reshape(-1)

    try:
        run(tensor.data[:1])
    except NotImplementedError:
        raise CheckpointError(
            f"{gguf.path}: tensor {tensor.name!r} has type {tensor.type_name}, which the gguf library cannot dequantise"
        ) from None
    return run
