"""The operations of a layer, compiled. Threads take some rows at a time; no row knows of another.

All arithmetic is in float32. In bfloat16 what torch would round between two operations is rounded here, too.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from girih.kernels.kernel import Kernel
from girih.kernels.lanes import (
    LANES,
    add,
    bytes_of,
    divide,
    exp2,
    fetch_add,
    inner,
    larger,
    load_as,
    load_some,
    multiply,
    multiply_add,
    rounded,
    splat,
    store_as,
    store_some,
    subtract,
    total,
)


def _record(*names: str) -> np.dtype[Any]:
    """Return a record of int64, and float64 where a name says so, with the counter of `deal_out`: rows taken."""
    names = ("num_rows", "rows_at_once", *names, "counter", "counted")
    return np.dtype([(name, np.float64 if name.endswith(("_eps", "_offset")) else np.int64) for name in names])


NORM_JOB = _record(
    "x", "delta", "normed", "size",  # addresses [num_rows, size]; delta: 0 for none
    "after", "after_eps", "after_offset",  # address of weights [size], 0 for none; the offset is added to them
    "norm", "norm_eps", "norm_offset",  # 0 for none: only add
)  # fmt: skip

HEADS_JOB = _record(
    "merged", "row_bytes", "num_queries", "num_keys", "head_size",  # address; heads that lie one behind the other
    "cos", "sin", "angle_bytes",  # addresses; bytes from row to row
    "query_norm", "query_eps", "query_offset",  # as above, weights [head_size]
    "key_norm", "key_eps", "key_offset",
)  # fmt: skip

GATE_JOB = _record("merged", "gated", "size")  # addresses [num_rows, 2 * size] and [num_rows, size]

_SILU, _GELU = 0, 1

_LOG2_E = np.float32(math.log2(math.e))
_TWICE_SQRT_2_PI = np.float32(2 * math.sqrt(2 / math.pi))
_GELU_CUBE = np.float32(0.044715)
_LEAST_POWER = np.float32(-126)


@inner
def _read(at: int, room: int, kind: Any) -> Any:
    """Return 16 numbers at an address, or as many as there is room for, and zeros."""
    if room >= LANES:
        return load_as(at, kind)
    return load_some(at, room, kind)


@inner
def _write(at: int, lanes: Any, room: int, kind: Any) -> None:
    if room >= LANES:
        store_as(at, lanes, kind)
    else:
        store_some(at, lanes, room, kind)


@inner
def _take(job: Any) -> int:
    """Return the first of the rows that this thread does next."""
    return fetch_add(job.counter, job.rows_at_once)


@inner
def _inverse_rms(x: int, size: int, eps: float, kind: Any) -> Any:
    squares = splat(np.float32(0))
    for i in range(0, size, LANES):
        part = _read(x + i * bytes_of(kind), size - i, kind)
        squares = multiply_add(part, part, squares)
    mean = total(squares) / np.float32(size) + np.float32(eps)
    return np.float32(1) / np.sqrt(mean)


@inner
def _weighted(x: int, weight: int, factor: float, offset: float, room: int, kind: Any) -> Any:
    """Return 16 numbers of a normalised row; without an offset they are rounded before the weight, as in llama."""
    normed = multiply(_read(x, room, kind), splat(factor))
    if offset == 0:
        normed = rounded(normed, kind)
    return multiply(normed, add(_read(weight, room, kind), splat(np.float32(offset))))


@inner
def _normalise(x: int, weight: int, size: int, eps: float, offset: float, to: int, kind: Any) -> None:
    factor = _inverse_rms(x, size, eps, kind)
    for i in range(0, size, LANES):
        at = i * bytes_of(kind)
        _write(to + at, _weighted(x + at, weight + at, factor, offset, size - i, kind), size - i, kind)


@inner
def _add(job: Any, x: int, delta: int, kind: Any) -> None:
    """Add a row of delta to one of x, as it is or normalised."""
    size = job.size
    factor = _inverse_rms(delta, size, job.after_eps, kind) if job.after else np.float32(1)
    for i in range(0, size, LANES):
        at, room = i * bytes_of(kind), size - i
        if job.after:
            part = rounded(_weighted(delta + at, job.after + at, factor, job.after_offset, room, kind), kind)
        else:
            part = _read(delta + at, room, kind)
        _write(x + at, add(_read(x + at, room, kind), part), room, kind)


@inner
def _add_norm(job: Any, kind: Any) -> None:
    row_bytes = job.size * bytes_of(kind)
    first = _take(job)
    while first < job.num_rows:
        for row in range(first, min(first + job.rows_at_once, job.num_rows)):
            at = row * row_bytes
            if job.delta:
                _add(job, job.x + at, job.delta + at, kind)
            if job.norm:
                _normalise(job.x + at, job.norm, job.size, job.norm_eps, job.norm_offset, job.normed + at, kind)
        first = _take(job)


@inner
def _turn(head: int, half: int, cos: int, sin: int, kind: Any) -> None:
    """Turn each pair (head[i], head[i + half]) by its angle."""
    for i in range(0, half, LANES):
        at, room = i * bytes_of(kind), half - i
        first, second = head + at, head + at + half * bytes_of(kind)
        a, b = _read(first, room, kind), _read(second, room, kind)
        c, s = _read(cos + at, room, kind), _read(sin + at, room, kind)
        _write(first, subtract(rounded(multiply(a, c), kind), rounded(multiply(b, s), kind)), room, kind)
        _write(second, add(rounded(multiply(b, c), kind), rounded(multiply(a, s), kind)), room, kind)


@inner
def _heads_of_row(job: Any, row: int, kind: Any) -> None:
    size = job.head_size
    cos, sin = job.cos + row * job.angle_bytes, job.sin + row * job.angle_bytes
    for i in range(job.num_queries + job.num_keys):
        head = job.merged + row * job.row_bytes + i * size * bytes_of(kind)
        if i < job.num_queries:
            if job.query_norm:
                _normalise(head, job.query_norm, size, job.query_eps, job.query_offset, head, kind)
        elif job.key_norm:
            _normalise(head, job.key_norm, size, job.key_eps, job.key_offset, head, kind)
        _turn(head, size // 2, cos, sin, kind)


@inner
def _split_heads(job: Any, kind: Any) -> None:
    first = _take(job)
    while first < job.num_rows:
        for row in range(first, min(first + job.rows_at_once, job.num_rows)):
            _heads_of_row(job, row, kind)
        first = _take(job)


@inner
def _times_sigmoid(x: Any, a: Any) -> Any:
    """Return x * sigmoid(a) = x / (1 + 2 ** (-a * log2(e)))."""
    power = larger(splat(_LEAST_POWER), multiply(a, splat(_LOG2_E)))
    return divide(x, add(splat(np.float32(1)), exp2(subtract(splat(np.float32(0)), power))))


@inner
def _activate(x: Any, activation: int) -> Any:
    if activation == _SILU:
        return _times_sigmoid(x, x)
    # gelu: 0.5 * x * (1 + tanh(u)) is x * sigmoid(2 * u)
    cubed = multiply(multiply(multiply(x, x), x), splat(_GELU_CUBE))
    return _times_sigmoid(x, multiply(add(x, cubed), splat(_TWICE_SQRT_2_PI)))


@inner
def _gate(job: Any, activation: int, kind: Any) -> None:
    row_bytes = job.size * bytes_of(kind)
    first = _take(job)
    while first < job.num_rows:
        for row in range(first, min(first + job.rows_at_once, job.num_rows)):
            gate, gated = job.merged + 2 * row * row_bytes, job.gated + row * row_bytes
            for i in range(0, job.size, LANES):
                at, room = i * bytes_of(kind), job.size - i
                active = rounded(_activate(_read(gate + at, room, kind), activation), kind)
                _write(gated + at, multiply(active, _read(gate + at + row_bytes, room, kind)), room, kind)
        first = _take(job)


def _add_norm_float32(job: Any) -> None:
    _add_norm(job, np.float32)


def _add_norm_bfloat16(job: Any) -> None:
    _add_norm(job, np.uint16)


def _split_heads_float32(job: Any) -> None:
    _split_heads(job, np.float32)


def _split_heads_bfloat16(job: Any) -> None:
    _split_heads(job, np.uint16)


def _silu_float32(job: Any) -> None:
    _gate(job, _SILU, np.float32)


def _silu_bfloat16(job: Any) -> None:
    _gate(job, _SILU, np.uint16)


def _gelu_float32(job: Any) -> None:
    _gate(job, _GELU, np.float32)


def _gelu_bfloat16(job: Any) -> None:
    _gate(job, _GELU, np.uint16)


ADD_NORM = {
    torch.float32: Kernel(_add_norm_float32, NORM_JOB),
    torch.bfloat16: Kernel(_add_norm_bfloat16, NORM_JOB),
}
"""See `girih.layers.operations.Operations.add` and `add_norm`; x is changed in place."""

SPLIT_HEADS = {
    torch.float32: Kernel(_split_heads_float32, HEADS_JOB),
    torch.bfloat16: Kernel(_split_heads_bfloat16, HEADS_JOB),
}
"""Normalise and turn the heads of queries and keys in place."""

GATE = {
    ("silu", torch.float32): Kernel(_silu_float32, GATE_JOB),
    ("silu", torch.bfloat16): Kernel(_silu_bfloat16, GATE_JOB),
    ("gelu_pytorch_tanh", torch.float32): Kernel(_gelu_float32, GATE_JOB),
    ("gelu_pytorch_tanh", torch.bfloat16): Kernel(_gelu_bfloat16, GATE_JOB),
}
"""activation(gate) * up."""
