"""The kernels of `cpu.py` and `int8.py`: columns of the result are dealt out to threads, some at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from girih.kernels.kernel import Kernel
from girih.kernels.lanes import (
    LANES,
    array_at,
    fetch_add,
    inner,
    larger,
    largest,
    load,
    multiply,
    multiply_add,
    splat,
    store,
    subtract,
    total,
)
from girih.linear._products import (
    EXACT_COLUMNS,
    PANEL,
    WEIGHT_ROWS,
    X_STEPS,
    int8_products1,
    int8_products2,
    int8_products3,
    int8_products4,
    products1,
    products2,
    products3,
    products4,
    store_shorts,
)

MAX_CHUNK = 256
"""Columns of the result that a thread takes at once, at most."""

MIN_THREAD_PRODUCTS = 1 << 16
"""Of numbers; for fewer another thread is not worth its start."""

ROW_BLOCK = 64
"""Rows that meet all columns of a chunk before the next ones: they stay in the first or second cache."""

F4_BYTES = 4
LANES_BYTES = LANES * F4_BYTES
ZERO, LARGEST = np.float32(0), np.float32(X_STEPS)

JOB = np.dtype(
    [
        (name, np.int64)
        for name in (
            "x", "num_rows", "size",  # address: float32 [num_rows, size]
            "weight", "num_columns", "chunk",  # address: [num_columns, size]
            "output",  # address: float32 [num_rows, num_columns]
            "counter", "taken",  # address of the other; columns
        )
    ]
)  # fmt: skip

INT8_JOB = np.dtype(
    [
        (name, np.int64)
        for name in (
            # addresses: int16 [num_rows, size] and float32 [num_rows]; where there are none, of few rows, each thread
            # makes them of `exact`, float32 [num_rows, size], in its own part of `scratch`
            "x", "x_scales", "exact", "scratch",
            "num_rows", "size", "weight", "scales", "num_columns", "chunk",  # weight: address: int8, in panels
            "output",  # address: float32 [num_rows, num_columns]
            "threads",  # 0 at first: how many threads have begun
            "counter", "taken",  # address of the other; columns
        )
    ]
)  # fmt: skip

QUANTISE_JOB = np.dtype(
    [
        (name, np.int64)
        for name in (
            "x", "num_rows", "size",  # address: float32 [num_rows, size]
            "output",  # address: int16 [num_rows, size]
            "scales",  # address: float32 [num_rows]
            "chunk",  # rows that a thread takes at once
            "counter", "taken",  # address of the other; rows
        )
    ]
)  # fmt: skip


def num_threads(num_products: int) -> int:
    """Return how many threads so many products of numbers are worth."""
    return max(1, min(torch.get_num_threads(), num_products // MIN_THREAD_PRODUCTS))


def chunk_columns(num_columns: int, threads: int, multiple: int) -> int:
    """Return how many columns a thread takes at once, a multiple: so few that none waits long for the last."""
    return max(multiple, min(MAX_CHUNK, num_columns // (4 * threads)) // multiple * multiple)


@inner
def _rows(job: Any, first: int, stop: int, column: int, kind: Any, itemsize: int) -> None:
    """Multiply some rows and four columns."""
    x_bytes, weight_bytes, output_bytes = job.size * F4_BYTES, job.size * itemsize, job.num_columns * F4_BYTES
    weight, output = job.weight + column * weight_bytes, job.output + column * F4_BYTES
    for row in range(first, stop, 4):
        x, to = job.x + row * x_bytes, output + row * output_bytes
        if stop - row >= 4:
            products4(x, x_bytes, weight, weight_bytes, job.size, kind, to, output_bytes)
        elif stop - row == 3:
            products3(x, x_bytes, weight, weight_bytes, job.size, kind, to, output_bytes)
        elif stop - row == 2:
            products2(x, x_bytes, weight, weight_bytes, job.size, kind, to, output_bytes)
        else:
            products1(x, x_bytes, weight, weight_bytes, job.size, kind, to, output_bytes)


@inner
def _multiply(job: Any, kind: Any, itemsize: int) -> None:
    """Take columns until none is left."""
    first = fetch_add(job.counter, job.chunk)
    while first < job.num_columns:
        stop = min(first + job.chunk, job.num_columns)
        for row in range(0, job.num_rows, ROW_BLOCK):
            for column in range(first, stop, WEIGHT_ROWS):
                _rows(job, row, min(row + ROW_BLOCK, job.num_rows), column, kind, itemsize)
        first = fetch_add(job.counter, job.chunk)


@inner
def _int8_rows(job: Any, x: int, first: int, stop: int, column: int, part: int, size: int) -> None:
    """Multiply a part of some rows, its first column and size, and one panel of int8."""
    x_bytes, output_bytes = job.size * 2, job.num_columns * F4_BYTES
    panel, output = job.weight + column * job.size + part * PANEL, job.output + column * F4_BYTES
    for row in range(first, stop, 4):
        rows, to = x + row * x_bytes, output + row * output_bytes
        if stop - row >= 4:
            int8_products4(rows, x_bytes, part, size, panel, to, output_bytes)
        elif stop - row == 3:
            int8_products3(rows, x_bytes, part, size, panel, to, output_bytes)
        elif stop - row == 2:
            int8_products2(rows, x_bytes, part, size, panel, to, output_bytes)
        else:
            int8_products1(rows, x_bytes, part, size, panel, to, output_bytes)


@inner
def _int8_panel(job: Any, x: int, x_scales: int, first: int, stop: int, column: int) -> None:
    """Multiply some rows and one panel of int8: whole numbers part by part, then the scales."""
    for row in range(first, stop):
        for i in range(0, PANEL * F4_BYTES, LANES_BYTES):
            store(job.output + (row * job.num_columns + column) * F4_BYTES + i, splat(ZERO))
    for part in range(0, job.size, EXACT_COLUMNS):
        _int8_rows(job, x, first, stop, column, part, min(EXACT_COLUMNS, job.size - part))
    for row in range(first, stop):
        x_scale = splat(array_at(x_scales, job.num_rows, np.float32)[row])
        for i in range(0, PANEL * F4_BYTES, LANES_BYTES):
            at = job.output + (row * job.num_columns + column) * F4_BYTES + i
            scaled = multiply(load(at), load(job.scales + column * F4_BYTES + i))
            store(at, multiply(scaled, x_scale))


def _float32(job: Any) -> None:
    _multiply(job, np.float32, 4)


def _bfloat16(job: Any) -> None:
    _multiply(job, np.uint16, 2)


@inner
def _quantise_row(x: int, size: int, output: int, scale: Any) -> None:
    """Write a row as int16, and its scale; `size` is whole vectors."""
    zero = splat(ZERO)
    top, wrong = zero, zero
    for i in range(0, size, LANES):
        numbers = load(x + i * F4_BYTES)
        top = larger(larger(numbers, subtract(zero, numbers)), top)
        wrong = multiply_add(numbers, zero, wrong)  # zero, or no number if any is not finite
    most = largest(top)
    scale[0] = most / LARGEST + total(wrong)
    inverse = splat(LARGEST / most if most > ZERO else ZERO)
    for i in range(0, size, LANES):
        store_shorts(output + i * 2, multiply(load(x + i * F4_BYTES), inverse))


def _int8(job: Any) -> None:
    x, x_scales = job.x, job.x_scales
    if x == 0:
        x = job.scratch + fetch_add(job.counter - 2 * 8, 1) * job.num_rows * (job.size * 2 + F4_BYTES)
        x_scales = x + job.num_rows * job.size * 2
        for row in range(job.num_rows):
            scale = array_at(x_scales + row * F4_BYTES, 1, np.float32)
            _quantise_row(job.exact + row * job.size * F4_BYTES, job.size, x + row * job.size * 2, scale)
    first = fetch_add(job.counter, job.chunk)
    while first < job.num_columns:
        stop = min(first + job.chunk, job.num_columns)
        for row in range(0, job.num_rows, ROW_BLOCK):
            for column in range(first, stop, PANEL):
                _int8_panel(job, x, x_scales, row, min(row + ROW_BLOCK, job.num_rows), column)
        first = fetch_add(job.counter, job.chunk)


def _quantise(job: Any) -> None:
    first = fetch_add(job.counter, job.chunk)
    while first < job.num_rows:
        for row in range(first, min(first + job.chunk, job.num_rows)):
            scale = array_at(job.scales + row * F4_BYTES, 1, np.float32)
            _quantise_row(job.x + row * job.size * F4_BYTES, job.size, job.output + row * job.size * 2, scale)
        first = fetch_add(job.counter, job.chunk)


FLOAT32, BFLOAT16 = Kernel(_float32, JOB), Kernel(_bfloat16, JOB)
"""By the weight's dtype: take columns until none is left; any number of threads may do so at once."""

INT8, QUANTISE = Kernel(_int8, INT8_JOB), Kernel(_quantise, QUANTISE_JOB)
"""The same with int8; take rows until none is left."""
