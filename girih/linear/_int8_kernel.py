"""The kernels of `int8.py`: columns of the result are dealt out to threads, some at a time.

Rows of activations are rounded either before (`QUANTISE`), or, if they are few, by each thread that multiplies them,
which takes less than to wait for one that does.

    INT8         any processor; rows are int16 [width]
    INT8_TILES   one with a matrix unit, see `_int8_tiles.py`; rows are int8 [width], then uint8 [width]
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.kernel import Kernel
from girih.kernels.lanes import (
    LANES,
    add,
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
from girih.linear._int8_products import (
    EXACT_COLUMNS,
    PANEL,
    X_STEPS,
    int8_products1,
    int8_products2,
    int8_products3,
    int8_products4,
    store_halves,
    store_shorts,
)
from girih.linear._int8_tiles import SHAPES_BYTES, SUMS_BYTES, TILE_ROWS, shape_tiles, tile_products, whole_sums
from girih.units import round_up

ROW_BLOCK = 64
"""Rows that meet all columns of a chunk before the next ones: they stay in the first or second cache."""

F4_BYTES = 4
LANES_BYTES = LANES * F4_BYTES
ZERO, LARGEST = np.float32(0), np.float32(X_STEPS)

SMALLEST = np.float32(1e-30)
"""A row whose largest number is below this counts as zeros: its inverse would be infinite."""

JOB = np.dtype(
    [
        (name, np.int64)
        for name in (
            # addresses: rounded rows [num_rows, 2 * width bytes] and their scales, float32 [num_rows]; where there are
            # none, each thread makes them of `exact`, float32 [num_rows, size], in its own part of `scratch`
            "x", "x_scales", "exact", "scratch", "scratch_bytes",
            "num_rows", "size", "width",  # columns that there are, and with zeros behind them
            "weight", "scales", "num_columns", "chunk",  # weight: address: int8, in panels
            "output",  # address: float32 [num_rows, num_columns]
            "shapes",  # address: of tiles
            "threads",  # 0 at first: how many threads have begun
            "counter", "taken",  # address of the other; columns
        )
    ]
)  # fmt: skip

QUANTISE_JOB = np.dtype(
    [
        (name, np.int64)
        for name in (
            "x", "num_rows", "size", "width",  # address: float32 [num_rows, size]
            "output", "in_halves",  # address: [num_rows, 2 * width bytes]; whether upper bytes come before lower ones
            "scales",  # address: float32 [num_rows]
            "chunk",  # rows that a thread takes at once
            "counter", "taken",  # address of the other; rows
        )
    ]
)  # fmt: skip


def scratch_bytes(num_rows: int, width: int) -> int:
    """Return the bytes a thread needs that rounds so many rows; the last part of them is for tiles."""
    rows = round_up(num_rows, TILE_ROWS) * (2 * width + F4_BYTES)  # whole tiles are read, also of fewer rows
    return rows + SUMS_BYTES + SHAPES_BYTES


@inner
def _quantise_row(x: int, size: int, width: int, output: int, in_halves: int, scale: Any) -> None:
    """Write a row rounded, and its scale; `size` is whole vectors."""
    zero = splat(ZERO)
    top, wrong = zero, zero
    for i in range(0, size, LANES):
        numbers = load(x + i * F4_BYTES)
        top = larger(larger(numbers, subtract(zero, numbers)), top)
        wrong = multiply_add(numbers, zero, wrong)  # zero, or no number if any is not finite
    most = largest(top)
    scale[0] = most / LARGEST + total(wrong)
    inverse = splat(LARGEST / most if most >= SMALLEST else ZERO)
    for i in range(0, width, LANES):
        numbers = multiply(load(x + i * F4_BYTES), inverse) if i < size else zero
        if in_halves:
            store_halves(output + i, output + width + i, numbers)
        else:
            store_shorts(output + i * 2, numbers)


@inner
def _quantise_rows(job: Any, x: int, in_halves: int) -> None:
    """Round all rows to an address, with their scales behind them."""
    x_bytes = 2 * job.width
    for row in range(job.num_rows):
        scale = array_at(x + job.num_rows * x_bytes + row * F4_BYTES, 1, np.float32)
        exact = job.exact + row * job.size * F4_BYTES
        _quantise_row(exact, job.size, job.width, x + row * x_bytes, in_halves, scale)


@inner
def _own_scratch(job: Any) -> int:
    """Return where this thread's part begins."""
    return job.scratch + fetch_add(job.counter - 2 * 8, 1) * job.scratch_bytes


@inner
def _int8_rows(job: Any, x: int, first: int, stop: int, column: int, part: int, size: int) -> None:
    """Multiply a part of some rows, its first column and size, and one panel."""
    x_bytes, output_bytes = 2 * job.width, job.num_columns * F4_BYTES
    panel, output = job.weight + column * job.width + part * PANEL, job.output + column * F4_BYTES
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
def _scaled(job: Any, sums: Any, x_scale: Any, column: int) -> Any:
    """Return 16 sums of a row, from a column on, times their scales."""
    return multiply(multiply(sums, load(job.scales + column * F4_BYTES)), x_scale)


@inner
def _int8_panel(job: Any, x: int, x_scales: int, first: int, stop: int, column: int) -> None:
    """Multiply some rows and one panel: whole numbers part by part, then the scales."""
    for row in range(first, stop):
        for i in range(0, PANEL * F4_BYTES, LANES_BYTES):
            store(job.output + (row * job.num_columns + column) * F4_BYTES + i, splat(ZERO))
    for part in range(0, job.width, EXACT_COLUMNS):
        _int8_rows(job, x, first, stop, column, part, min(EXACT_COLUMNS, job.width - part))
    for row in range(first, stop):
        x_scale = splat(array_at(x_scales, job.num_rows, np.float32)[row])
        for i in range(0, PANEL, LANES):
            at = job.output + (row * job.num_columns + column + i) * F4_BYTES
            store(at, _scaled(job, load(at), x_scale, column + i))


def _int8(job: Any) -> None:
    x, x_scales = job.x, job.x_scales
    if x == 0:
        x = _own_scratch(job)
        x_scales = x + job.num_rows * 2 * job.width
        _quantise_rows(job, x, 0)
    first = fetch_add(job.counter, job.chunk)
    while first < job.num_columns:
        stop = min(first + job.chunk, job.num_columns)
        for row in range(0, job.num_rows, ROW_BLOCK):
            for column in range(first, stop, PANEL):
                _int8_panel(job, x, x_scales, row, min(row + ROW_BLOCK, job.num_rows), column)
        first = fetch_add(job.counter, job.chunk)


@inner
def _take_sums(job: Any, x_scales: int, row: int, column: int, part: int, sums: int) -> None:
    """Add what tiles have summed up to some rows of the output, and multiply the scales after the last part."""
    is_last = part + EXACT_COLUMNS >= job.width
    for i in range(min(TILE_ROWS, job.num_rows - row)):
        x_scale = splat(array_at(x_scales, job.num_rows, np.float32)[row + i])
        for half in range(2):
            at = job.output + ((row + i) * job.num_columns + column + half * LANES) * F4_BYTES
            tile = sums + (half * TILE_ROWS + i) * LANES_BYTES
            numbers = whole_sums(tile, tile + 2 * TILE_ROWS * LANES_BYTES)
            if part > 0:
                numbers = add(load(at), numbers)
            store(at, _scaled(job, numbers, x_scale, column + half * LANES) if is_last else numbers)


@inner
def _tiles_of_panel(job: Any, x: int, x_scales: int, first: int, stop: int, column: int, sums: int) -> None:
    """Multiply some rows and one panel, tile by tile; the first ones bring the next panel near."""
    x_bytes = 2 * job.width
    for row in range(first, stop, TILE_ROWS):
        for part in range(0, job.width, EXACT_COLUMNS):
            panel, size = job.weight + column * job.width + part * PANEL, min(EXACT_COLUMNS, job.width - part)
            next_panel = panel + job.width * PANEL if row == 0 else 0
            tile_products(x + row * x_bytes + part, x_bytes, job.width, size, panel, next_panel, sums)
            _take_sums(job, x_scales, row, column, part, sums)


def _int8_tiles(job: Any) -> None:
    scratch = _own_scratch(job)
    x, x_scales = job.x, job.x_scales
    if x == 0:
        x, x_scales = scratch, scratch + job.num_rows * 2 * job.width
        _quantise_rows(job, x, 1)
    shapes = scratch + job.scratch_bytes - SHAPES_BYTES
    sums = shapes - SUMS_BYTES
    shape_tiles(job.shapes, shapes)
    first = fetch_add(job.counter, job.chunk)
    while first < job.num_columns:
        stop = min(first + job.chunk, job.num_columns)
        for row in range(0, job.num_rows, ROW_BLOCK):
            for column in range(first, stop, PANEL):
                _tiles_of_panel(job, x, x_scales, row, min(row + ROW_BLOCK, job.num_rows), column, sums)
        first = fetch_add(job.counter, job.chunk)
    shape_tiles(shapes, sums)


def _quantise(job: Any) -> None:
    first = fetch_add(job.counter, job.chunk)
    while first < job.num_rows:
        for row in range(first, min(first + job.chunk, job.num_rows)):
            scale = array_at(job.scales + row * F4_BYTES, 1, np.float32)
            x, to = job.x + row * job.size * F4_BYTES, job.output + row * 2 * job.width
            _quantise_row(x, job.size, job.width, to, job.in_halves, scale)
        first = fetch_add(job.counter, job.chunk)


INT8, INT8_TILES = Kernel(_int8, JOB), Kernel(_int8_tiles, JOB)
"""Take columns until none is left; any number of threads may do so at once."""

QUANTISE = Kernel(_quantise, QUANTISE_JOB)
"""Take rows until none is left."""
