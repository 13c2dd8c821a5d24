"""Paged attention on a CPU, compiled: queries of one row over its pages, in one pass with an online softmax.

    positions   0              512             1024        1300
                |  partition    |  partition    | partition |
                |t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|      tiles: keys and values of one head as dense float32

A tile serves every query of the item and all query heads that share its head. What a partition gives (largest score,
sum of weights, weighted values) is merged, partition by partition, into what those before it gave. Tiles and partitions
are cut at fixed positions, so that a token's result has the same bits whatever else is in the batch, however its row
was cut into steps and items, and whatever number of threads there is.

An item of work is a few queries over some partitions. Items of a row that is split have one partition each, and who
ends the last of them merges them all, in order. Scores are in units of log2, so that the exponential is a power of two.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from girih.attention._lanes import (
    LANES,
    Kernel,
    add,
    array_at,
    dot16,
    exp2,
    fetch_add,
    inner,
    keep,
    larger,
    largest,
    load,
    load_few,
    multiply,
    multiply_add,
    splat,
    store,
    subtract,
    total,
)

PARTITION_TOKENS = 512

TILE_BYTES = 16 << 10
"""Of a tile's keys, or values: both and some queries stay in the first cache."""

MAX_TILE_TOKENS = 64

F4 = np.float32
F4_BYTES = 4
LANES_BYTES = LANES * F4_BYTES

_ZERO, _ONE, _NOTHING = F4(0), F4(1), F4(-np.inf)

ITEM = np.dtype(
    [
        (name, np.int64)
        for name in (
            "row",  # of the block table
            "token", "num_queries",  # in the batch: its first query, and how many
            "position",  # of the first query
            "first", "stop",  # positions of the keys
            "split", "num_split",  # first of the items that are merged, and their number; 0 if there is only this one
        )
    ]
)  # fmt: skip

JOB = np.dtype(
    [
        (name, np.int64)
        for name in (
            # addresses: float32 [num_tokens, num_heads, padded head size], float32 [num_tokens, num_heads, v_head_size]
            "query", "output",
            # addresses of page 0; elements from page to page; addresses of the scales are 0 where there are none
            "key", "value", "key_scale", "value_scale",
            "key_stride", "value_stride", "key_scale_stride", "value_scale_stride",
            "itemsize", "block_size", "num_kv_heads", "heads_per_kv_head", "head_size", "v_head_size",
            "window", "tile_tokens",  # tokens that a query sees; see `tile_tokens`
            "block_table", "table_width",  # address: int32 [num_rows, table_width]
            "items", "num_items",  # address: ITEM [num_items]
            "counters",  # address: int64 [2 + num_items], zeros: threads, items taken, items done of each split
            # addresses: [num_items, partial_bytes] if any is split; [threads, scratch_bytes]
            "partials", "partial_bytes", "scratch", "scratch_bytes",
        )
    ]
)  # fmt: skip


def padded(size: int) -> int:
    """Return the size of a head in whole vectors."""
    return -(-size // LANES) * LANES


def tile_tokens(head_size: int, v_head_size: int) -> int:
    """Return the tokens of a tile, a multiple of 16."""
    tokens = TILE_BYTES // (F4_BYTES * padded(max(head_size, v_head_size)))
    return max(LANES, min(MAX_TILE_TOKENS, tokens // LANES * LANES))


def partial_bytes(num_queries: int, num_heads: int, v_head_size: int) -> int:
    """Return the bytes of what a partition gives: for each query and head 16 times score and sum, and values."""
    return num_queries * num_heads * (2 * LANES + padded(v_head_size)) * F4_BYTES


def scratch_bytes(num_queries: int, num_heads: int, head_size: int, v_head_size: int) -> int:
    """Return the bytes a thread needs: keys, values and scores of a tile, and two results of items so large."""
    tile = tile_tokens(head_size, v_head_size) * (padded(head_size) + padded(v_head_size) + 1) * F4_BYTES
    return tile + 2 * partial_bytes(num_queries, num_heads, v_head_size)


_padded = inner(padded)


@inner
def _gather(
    kind: Any,
    itemsize: int,
    pages: int,
    stride: int,
    scales: int,
    scale_stride: int,
    head: int,
    num_heads: int,
    size: int,
    blocks: int,
    block_size: int,
    first: int,
    stop: int,
    to: int,
) -> None:
    """Copy one head of the keys, or values, of tokens first .. stop of a row to `to`, as float32 in whole vectors."""
    block = array_at(blocks, stop // block_size + 1, np.int32)
    whole = size // LANES * LANES
    position = first
    while position < stop:
        column = position // block_size
        page, slot = np.int64(block[column]), position - column * block_size
        end = min(block_size, slot + stop - position)
        position += end - slot
        for offset in range(slot, end):
            scale = splat(_ONE)
            if scales != 0:
                at = scales + (page * scale_stride + offset * num_heads + head) * F4_BYTES
                scale = splat(array_at(at, 1, np.float32)[0])
            source = pages + (page * stride + (offset * num_heads + head) * size) * itemsize
            for d in range(0, whole, LANES):
                store(to + d * F4_BYTES, multiply(load(source + d * itemsize, kind), scale))
            if whole < size:
                few = load_few(source + whole * itemsize, kind, size - whole)
                store(to + whole * F4_BYTES, multiply(few, scale))
            to += _padded(size) * F4_BYTES


@inner
def _clear(address: int, num_bytes: int) -> None:
    for at in range(address, address + num_bytes, LANES_BYTES):
        store(at, splat(_ZERO))


@inner
def _weights(query: int, keys: int, scores: int, first: int, stop: int, size: int, partial: int) -> Any:
    """Write the weights of keys first .. stop of a tile, zeros around them; bring the largest score and the sum of the
    partial result up to date; return the factor on what it had.
    """
    begin, end = first // LANES * LANES, (stop + LANES - 1) // LANES * LANES
    before = load(partial, np.float32)
    top = splat(_NOTHING)
    for j in range(begin, end, LANES):
        score = keep(dot16(query, keys + j * size * F4_BYTES, size), first - j, stop - j, _NOTHING)
        store(scores + j * F4_BYTES, score)
        top = larger(score, top)
    top = larger(splat(largest(top)), before)
    factor = exp2(subtract(before, top))
    weights = multiply(load(partial + LANES_BYTES, np.float32), factor)
    for j in range(begin, end, LANES):
        weight = exp2(subtract(load(scores + j * F4_BYTES, np.float32), top))
        weight = keep(weight, first - j, stop - j, _ZERO)
        store(scores + j * F4_BYTES, weight)
        weights = add(weights, weight)
    store(partial, top)
    store(partial + LANES_BYTES, weights)
    return factor


@inner
def _add_values_64(weights: int, values: int, num_values: int, row_bytes: int, factor: Any, sums: int) -> None:
    """Let 64 sums be sums * factor + weights @ values, an even number of them; even and odd ones are summed apart."""
    w = array_at(weights, num_values, np.float32)
    a0, a1 = multiply(load(sums, np.float32), factor), multiply(load(sums + 64, np.float32), factor)
    a2, a3 = multiply(load(sums + 128, np.float32), factor), multiply(load(sums + 192, np.float32), factor)
    b0 = b1 = b2 = b3 = splat(_ZERO)
    for j in range(0, num_values, 2):
        even, odd, next_row = splat(w[j]), splat(w[j + 1]), values + row_bytes
        a0 = multiply_add(even, load(values, np.float32), a0)
        a1 = multiply_add(even, load(values + 64, np.float32), a1)
        a2 = multiply_add(even, load(values + 128, np.float32), a2)
        a3 = multiply_add(even, load(values + 192, np.float32), a3)
        b0 = multiply_add(odd, load(next_row, np.float32), b0)
        b1 = multiply_add(odd, load(next_row + 64, np.float32), b1)
        b2 = multiply_add(odd, load(next_row + 128, np.float32), b2)
        b3 = multiply_add(odd, load(next_row + 192, np.float32), b3)
        values = next_row + row_bytes
    store(sums, add(a0, b0))
    store(sums + 64, add(a1, b1))
    store(sums + 128, add(a2, b2))
    store(sums + 192, add(a3, b3))


@inner
def _add_values_16(weights: int, values: int, num_values: int, row_bytes: int, factor: Any, sums: int) -> None:
    w = array_at(weights, num_values, np.float32)
    a, b = multiply(load(sums, np.float32), factor), splat(_ZERO)
    for j in range(0, num_values, 2):
        a = multiply_add(splat(w[j]), load(values, np.float32), a)
        b = multiply_add(splat(w[j + 1]), load(values + row_bytes, np.float32), b)
        values += 2 * row_bytes
    store(sums, add(a, b))


@inner
def _add_values(weights: int, values: int, first: int, stop: int, size: int, factor: Any, sums: int) -> None:
    """Let sums [size] be sums * factor + the weighted values of keys first .. stop of a tile; both are even."""
    row_bytes = size * F4_BYTES
    weights += first * F4_BYTES
    values += first * row_bytes
    d = 0
    while d + 4 * LANES <= size:
        at = d * F4_BYTES
        _add_values_64(weights, values + at, stop - first, row_bytes, factor, sums + at)
        d += 4 * LANES
    while d < size:
        at = d * F4_BYTES
        _add_values_16(weights, values + at, stop - first, row_bytes, factor, sums + at)
        d += LANES


@inner
def _tile(
    job: Any, item: Any, kind: Any, head: int, start: int, first: int, stop: int, scratch: int, partials: int
) -> None:
    """Let the keys first .. stop of one head, in the tile from position `start` on, count for every query."""
    size, v_size = _padded(job.head_size), _padded(job.v_head_size)
    width, group = job.tile_tokens, job.heads_per_kv_head
    keys, values = scratch, scratch + width * size * F4_BYTES
    scores = values + width * v_size * F4_BYTES
    blocks = job.block_table + item.row * job.table_width * 4
    _gather(
        kind, job.itemsize, job.key, job.key_stride, job.key_scale, job.key_scale_stride, head, job.num_kv_heads,
        job.head_size, blocks, job.block_size, first, stop, keys + (first - start) * size * F4_BYTES,
    )  # fmt: skip
    _gather(
        kind, job.itemsize, job.value, job.value_stride, job.value_scale, job.value_scale_stride, head,
        job.num_kv_heads, job.v_head_size, blocks, job.block_size, first, stop,
        values + (first - start) * v_size * F4_BYTES,
    )  # fmt: skip
    # values are taken in pairs: a value beside the first or last one weighs 0, but must be a number
    if (first - start) % 2:
        _clear(values + (first - start - 1) * v_size * F4_BYTES, v_size * F4_BYTES)
    if (stop - start) % 2:
        _clear(values + (stop - start) * v_size * F4_BYTES, v_size * F4_BYTES)
    num_heads = group * job.num_kv_heads
    for q in range(item.num_queries):
        begin = max(first, item.position + q + 1 - job.window) - start
        end = min(stop, item.position + q + 1) - start
        if begin >= end:
            continue
        for g in range(head * group, (head + 1) * group):
            query = job.query + ((item.token + q) * num_heads + g) * size * F4_BYTES
            partial = partials + (q * num_heads + g) * (2 * LANES + v_size) * F4_BYTES
            factor = _weights(query, keys, scores, begin, end, size, partial)
            _add_values(scores, values, begin // 2 * 2, (end + 1) // 2 * 2, v_size, factor, partial + 2 * LANES_BYTES)


@inner
def _start(partials: int, num_partials: int, v_size: int) -> None:
    """Make partial results those of no key."""
    for i in range(num_partials):
        partial = partials + i * (2 * LANES + v_size) * F4_BYTES
        store(partial, splat(_NOTHING))
        _clear(partial + LANES_BYTES, LANES_BYTES + v_size * F4_BYTES)


@inner
def _merge(results: int, partials: int, num_partials: int, v_size: int) -> None:
    """Bring results up to date with those of the next partition."""
    for i in range(num_partials):
        at = i * (2 * LANES + v_size) * F4_BYTES
        result, partial = results + at, partials + at
        if array_at(partial, 1, np.float32)[0] == _NOTHING:
            continue  # the query sees none of its keys
        before, score = load(result, np.float32), load(partial, np.float32)
        top = larger(before, score)
        old, new = exp2(subtract(before, top)), exp2(subtract(score, top))
        store(result, top)
        for d in range(LANES_BYTES, 2 * LANES_BYTES + v_size * F4_BYTES, LANES_BYTES):
            sums = multiply(load(result + d, np.float32), old)
            store(result + d, multiply_add(load(partial + d, np.float32), new, sums))


@inner
def _finish(job: Any, item: Any, results: int) -> None:
    """Write the outputs of an item's queries."""
    v_size, num_heads = _padded(job.v_head_size), job.heads_per_kv_head * job.num_kv_heads
    for i in range(item.num_queries * num_heads):
        result = results + i * (2 * LANES + v_size) * F4_BYTES
        weights = total(load(result + LANES_BYTES, np.float32))
        values = array_at(result + 2 * LANES_BYTES, job.v_head_size, np.float32)
        at = job.output + (item.token * num_heads + i) * job.v_head_size * F4_BYTES
        output = array_at(at, job.v_head_size, np.float32)
        for d in range(job.v_head_size):
            output[d] = values[d] / weights


@inner
def _partition(job: Any, item: Any, kind: Any, first: int, stop: int, scratch: int, partials: int) -> None:
    """Compute what keys first .. stop, of one partition, give to the item's queries."""
    width = job.tile_tokens
    num_heads = job.heads_per_kv_head * job.num_kv_heads
    _start(partials, item.num_queries * num_heads, _padded(job.v_head_size))
    while first < stop:
        start = first // width * width
        for head in range(job.num_kv_heads):
            _tile(job, item, kind, head, start, first, min(stop, start + width), scratch, partials)
        first = start + width


@inner
def _item(job: Any, items: Any, index: int, kind: Any, scratch: int, room: int) -> None:
    """Compute one item; `room` holds two results."""
    item = items[index]
    v_size, num_heads = _padded(job.v_head_size), job.heads_per_kv_head * job.num_kv_heads
    num_partials = item.num_queries * num_heads
    num_bytes = num_partials * (2 * LANES + v_size) * F4_BYTES
    if item.num_split:
        _partition(job, item, kind, item.first, item.stop, scratch, job.partials + index * job.partial_bytes)
        if fetch_add(job.counters + (2 + item.split) * 8, 1) + 1 < item.num_split:
            return
        _start(room, num_partials, v_size)
        for other in range(item.split, item.split + item.num_split):
            _merge(room, job.partials + other * job.partial_bytes, num_partials, v_size)
    else:
        _start(room, num_partials, v_size)
        first = item.first
        while first < item.stop:
            stop = min(item.stop, first // PARTITION_TOKENS * PARTITION_TOKENS + PARTITION_TOKENS)
            _partition(job, item, kind, first, stop, scratch, room + num_bytes)
            _merge(room, room + num_bytes, num_partials, v_size)
            first = stop
    _finish(job, item, room)


@inner
def _attend(job: Any, items: Any, kind: Any) -> None:
    """Take items until none is left."""
    size, v_size = _padded(job.head_size), _padded(job.v_head_size)
    scratch = job.scratch + fetch_add(job.counters, 1) * job.scratch_bytes
    room = scratch + job.tile_tokens * (size + v_size + 1) * F4_BYTES
    while True:
        index = fetch_add(job.counters + 8, 1)
        if index >= job.num_items:
            return
        _item(job, items, index, kind, scratch, room)


def _attend_float32(job: Any) -> None:
    _attend(job, array_at(job.items, job.num_items, ITEM), np.float32)


def _attend_bfloat16(job: Any) -> None:
    _attend(job, array_at(job.items, job.num_items, ITEM), np.uint16)


def _attend_int8(job: Any) -> None:
    _attend(job, array_at(job.items, job.num_items, ITEM), np.int8)


ATTEND = {
    torch.float32: Kernel(_attend_float32, JOB),
    torch.bfloat16: Kernel(_attend_bfloat16, JOB),
    torch.int8: Kernel(_attend_int8, JOB),
}
"""By the cache's dtype: take items until none is left; any number of threads may do so at once."""
