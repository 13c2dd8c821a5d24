"""The kernels of `cpu.py`: columns of the result are dealt out to threads, some at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from girih.kernels.kernel import Kernel
from girih.kernels.lanes import (
    fetch_add,
    inner,
)
from girih.linear._products import (
    WEIGHT_ROWS,
    products1,
    products2,
    products3,
    products4,
)

MAX_CHUNK = 256
"""Columns of the result that a thread takes at once, at most."""

MIN_THREAD_PRODUCTS = 1 << 16
"""Of numbers; for fewer another thread is not worth its start."""

ROW_BLOCK = 64
"""Rows that meet all columns of a chunk before the next ones: they stay in the first or second cache."""

F4_BYTES = 4

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


def num_threads(num_products: int) -> int:
    """Return how many threads so many products of numbers are worth."""
    return max(1, min(torch.get_num_threads(), num_products // MIN_THREAD_PRODUCTS))


def chunk_columns(num_columns: int, threads: int, multiple: int) -> int:
    """Return how many columns a thread takes at once, a multiple: so few that none waits long for the last."""
    return max(multiple, min(MAX_CHUNK, num_columns // (4 * threads)) // multiple * multiple)


@inner
def _nears(passes: int, index: int) -> int:
    """Return which of the next four rows of the weight one of some passes brings near: all passes do their share.

    So that reading the weight goes on all the time, and not only while rows meet it first.
    """
    if passes >= 4:
        return 1 << index % 4
    return 15 if passes == 1 else 3 << 2 * (index % 2)


@inner
def _rows(job: Any, first: int, stop: int, column: int, kind: Any, itemsize: int) -> None:
    """Multiply some rows and four columns."""
    x_bytes, weight_bytes, output_bytes = job.size * F4_BYTES, job.size * itemsize, job.num_columns * F4_BYTES
    weight, output = job.weight + column * weight_bytes, job.output + column * F4_BYTES
    passes = (stop - first + 3) // 4
    for row in range(first, stop, 4):
        x, to, near = job.x + row * x_bytes, output + row * output_bytes, _nears(passes, (row - first) // 4)
        if stop - row >= 4:
            products4(x, x_bytes, weight, weight_bytes, job.size, kind, to, output_bytes, near)
        elif stop - row == 3:
            products3(x, x_bytes, weight, weight_bytes, job.size, kind, to, output_bytes, near)
        elif stop - row == 2:
            products2(x, x_bytes, weight, weight_bytes, job.size, kind, to, output_bytes, near)
        else:
            products1(x, x_bytes, weight, weight_bytes, job.size, kind, to, output_bytes, near)


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


def _float32(job: Any) -> None:
    _multiply(job, np.float32, 4)


def _bfloat16(job: Any) -> None:
    _multiply(job, np.uint16, 2)


FLOAT32, BFLOAT16 = Kernel(_float32, JOB), Kernel(_bfloat16, JOB)
"""By the weight's dtype: take columns until none is left; any number of threads may do so at once."""
