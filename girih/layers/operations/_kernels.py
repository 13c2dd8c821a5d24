"""The operations of a layer in float32, compiled. Threads take some rows at a time; no row knows of another."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from girih.kernels.kernel import Kernel
from girih.kernels.lanes import (
    LANES,
    add,
    divide,
    exp2,
    fetch_add,
    inner,
    larger,
    load,
    load_some,
    multiply,
    multiply_add,
    splat,
    store,
    store_some,
    subtract,
    total,
)

F4_BYTES = 4
LANES_BYTES = LANES * F4_BYTES


def _record(*names: str) -> np.dtype[Any]:
    """Return a record of int64, and float64 where a name says so, with the counter of `deal_out`: rows taken."""
    names = ("num_rows", "rows_at_once", *names, "counter", "counted")
    return np.dtype([(name, np.float64 if name.endswith(("_eps", "_offset")) else np.int64) for name in names])


NORM_JOB = _record(
    "x", "delta", "normed", "size",  # addresses [num_rows, size]; delta: 0 for none
    "after", "after_eps", "after_offset",  # address of weights [size], 0 for none; the offset is added to them
    "norm", "norm_eps", "norm_offset",
)  # fmt: skip

HEADS_JOB = _record(
    "merged", "row_bytes", "num_queries", "num_keys", "head_size",  # address; heads that lie one behind the other
    "cos", "sin", "angle_bytes",  # addresses; bytes from row to row
    "query_norm", "query_eps", "query_offset",  # as above, weights [head_size]
    "key_norm", "key_eps", "key_offset",
)  # fmt: skip

GATE_JOB = _record("merged", "gated", "size")  # addresses [num_rows, 2 * size] and [num_rows, size]

_LOG2_E = np.float32(math.log2(math.e))
_TWICE_SQRT_2_PI = np.float32(2 * math.sqrt(2 / math.pi))
_GELU_CUBE = np.float32(0.044715)
_LEAST_POWER = np.float32(-126)


@inner
def _read(at: int, room: int) -> Any:
    """Return 16 numbers at an address, or as many as there is room for, and zeros."""
    if room >= LANES:
        return load(at)
    return load_some(at, room)


@inner
def _write(at: int, lanes: Any, room: int) -> None:
    if room >= LANES:
        store(at, lanes)
    else:
        store_some(at, lanes, room)


@inner
def _take(job: Any) -> int:
    """Return the first of the rows that this thread does next."""
    return fetch_add(job.counter, job.rows_at_once)


@inner
def _inverse_rms(x: int, size: int, eps: float) -> Any:
    squares = splat(np.float32(0))
    for i in range(0, size, LANES):
        part = _read(x + i * F4_BYTES, size - i)
        squares = multiply_add(part, part, squares)
    mean = total(squares) / np.float32(size) + np.float32(eps)
    return splat(np.float32(1) / np.sqrt(mean))


@inner
def _weighted(x: int, weight: int, factor: Any, offset: Any, room: int) -> Any:
    """Return 16 numbers of a normalised row."""
    return multiply(multiply(_read(x, room), factor), add(_read(weight, room), offset))


@inner
def _normalise(x: int, weight: int, size: int, eps: float, offset: float, to: int) -> None:
    factor, offsets = _inverse_rms(x, size, eps), splat(np.float32(offset))
    for i in range(0, size, LANES):
        at = i * F4_BYTES
        _write(to + at, _weighted(x + at, weight + at, factor, offsets, size - i), size - i)


@inner
def _add(job: Any, x: int, delta: int) -> None:
    """Add a row of delta to one of x, as it is or normalised."""
    size = job.size
    if job.after:
        factor, offsets = _inverse_rms(delta, size, job.after_eps), splat(np.float32(job.after_offset))
        for i in range(0, size, LANES):
            at = i * F4_BYTES
            part = _weighted(delta + at, job.after + at, factor, offsets, size - i)
            _write(x + at, add(_read(x + at, size - i), part), size - i)
    else:
        for i in range(0, size, LANES):
            at = i * F4_BYTES
            _write(x + at, add(_read(x + at, size - i), _read(delta + at, size - i)), size - i)


def _add_norm(job: Any) -> None:
    row_bytes = job.size * F4_BYTES
    first = _take(job)
    while first < job.num_rows:
        for row in range(first, min(first + job.rows_at_once, job.num_rows)):
            at = row * row_bytes
            if job.delta:
                _add(job, job.x + at, job.delta + at)
            _normalise(job.x + at, job.norm, job.size, job.norm_eps, job.norm_offset, job.normed + at)
        first = _take(job)


@inner
def _turn(head: int, half: int, cos: int, sin: int) -> None:
    """Turn each pair (head[i], head[i + half]) by its angle."""
    for i in range(0, half, LANES):
        at = i * F4_BYTES
        room, first, second = half - i, head + at, head + at + half * F4_BYTES
        a, b = _read(first, room), _read(second, room)
        c, s = _read(cos + at, room), _read(sin + at, room)
        _write(first, subtract(multiply(a, c), multiply(b, s)), room)
        _write(second, add(multiply(b, c), multiply(a, s)), room)


@inner
def _heads_of_row(job: Any, row: int) -> None:
    size = job.head_size
    cos, sin = job.cos + row * job.angle_bytes, job.sin + row * job.angle_bytes
    for i in range(job.num_queries + job.num_keys):
        head = job.merged + row * job.row_bytes + i * size * F4_BYTES
        if i < job.num_queries:
            if job.query_norm:
                _normalise(head, job.query_norm, size, job.query_eps, job.query_offset, head)
        elif job.key_norm:
            _normalise(head, job.key_norm, size, job.key_eps, job.key_offset, head)
        _turn(head, size // 2, cos, sin)


def _split_heads(job: Any) -> None:
    first = _take(job)
    while first < job.num_rows:
        for row in range(first, min(first + job.rows_at_once, job.num_rows)):
            _heads_of_row(job, row)
        first = _take(job)


@inner
def _times_sigmoid(x: Any, a: Any) -> Any:
    """Return x * sigmoid(a) = x / (1 + 2 ** (-a * log2(e)))."""
    power = larger(splat(_LEAST_POWER), multiply(a, splat(_LOG2_E)))
    return divide(x, add(splat(np.float32(1)), exp2(subtract(splat(np.float32(0)), power))))


@inner
def _silu(x: Any) -> Any:
    return _times_sigmoid(x, x)


@inner
def _gelu(x: Any) -> Any:
    """Return 0.5 * x * (1 + tanh(u)), as x * sigmoid(2 * u)."""
    cubed = multiply(multiply(multiply(x, x), x), splat(_GELU_CUBE))
    return _times_sigmoid(x, multiply(add(x, cubed), splat(_TWICE_SQRT_2_PI)))


@inner
def _gate(job: Any, activation: Any) -> None:
    size = job.size
    first = _take(job)
    while first < job.num_rows:
        for row in range(first, min(first + job.rows_at_once, job.num_rows)):
            gate, gated = job.merged + 2 * row * size * F4_BYTES, job.gated + row * size * F4_BYTES
            for i in range(0, size, LANES):
                at, room = i * F4_BYTES, size - i
                up = _read(gate + at + size * F4_BYTES, room)
                _write(gated + at, multiply(activation(_read(gate + at, room)), up), room)
        first = _take(job)


def _gate_silu(job: Any) -> None:
    _gate(job, _silu)


def _gate_gelu(job: Any) -> None:
    _gate(job, _gelu)


ADD_NORM = Kernel(_add_norm, NORM_JOB)
"""See `girih.layers.operations.Operations.add_norm`; x is changed in place."""

SPLIT_HEADS = Kernel(_split_heads, HEADS_JOB)
"""Normalise and turn the heads of queries and keys in place."""

GATE = {"silu": Kernel(_gate_silu, GATE_JOB), "gelu_pytorch_tanh": Kernel(_gate_gelu, GATE_JOB)}
"""By activation: activation(gate) * up."""
