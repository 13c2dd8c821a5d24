"""Attention over one tile, compiled: some tokens of one row and key head, for several queries.

Keys and values are read where they lie: a tile is a list of addresses, of which those outside of the row's tokens point
to one that is. They become float32 in registers, once for four queries or heads. Where the size of a head is not
whole vectors, rows are copied first, with zeros behind them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.attention._cpu_products import (
    dots1,
    dots2,
    dots3,
    dots4,
    weigh1,
    weigh1_16,
    weigh2,
    weigh2_16,
    weigh3,
    weigh3_16,
    weigh4,
    weigh4_16,
)
from girih.kernels.lanes import (
    LANES,
    add,
    array_at,
    exp2,
    inner,
    keep,
    larger,
    largest,
    load,
    multiply,
    prefetch,
    splat,
    store,
    subtract,
)  # fmt: skip

TILE_BYTES = 16 << 10
"""Of a tile's keys, or values: both and some queries stay in the first cache."""

MAX_TILE_TOKENS = 64

PARTITION_TOKENS = 512
"""What these give is merged in order; a multiple of any tile's tokens."""

F4 = np.float32
F4_BYTES = 4
LANES_BYTES = LANES * F4_BYTES

ZERO, ONE, NOTHING = F4(0), F4(1), F4(-np.inf)

ITEM = np.dtype(
    [
        (name, np.int64)
        for name in (
            "row",  # of the block table
            "token", "num_queries",  # as queries are laid out: its first one, and how many
            "position",  # of the first query
            "first", "stop",  # positions of the keys
            "split", "num_split",  # first of the items that are merged, and their number; 0 if there is only this one
            "part", "num_parts",  # what others have computed of the partitions before: first and number
            "goes_on",  # whether the last part is only the beginning of a partition, which is for the row to end
        )
    ]
)  # fmt: skip

PART = np.dtype([(name, np.int64) for name in ("item", "query", "num_queries")])
"""Where a row finds what a shared item gave: its number, which of its queries, and how many it has."""

JOB = np.dtype(
    [
        (name, np.int64)
        for name in (
            # addresses, float32: [num_kv_heads, num_tokens, heads of each, padded head size], [tokens, heads, size]
            "query", "output",
            # addresses of page 0; elements from page to page; addresses of the scales are 0 where there are none
            "key", "value", "key_scale", "value_scale",
            "key_stride", "value_stride", "key_scale_stride", "value_scale_stride",
            "num_tokens", "itemsize", "block_size", "num_kv_heads", "heads_per_kv_head", "head_size", "v_head_size",
            "window", "tile_tokens",  # tokens that a query sees; see `tile_tokens`
            "block_table", "table_width",  # address: int32 [num_rows, table_width]
            "items", "num_items",  # address: ITEM [num_items]
            "order",  # address: int64 [num_tokens], token of each query as they are laid out
            # whether items are shared ones; addresses: PART of each row, [shared items, shared_bytes]
            "is_shared", "parts", "shared", "shared_bytes",
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


def tile_bytes(tokens: int, head_size: int, v_head_size: int) -> int:
    """Return the bytes for a tile: addresses and scales of keys and values, 4 rows of scores, 4 factors, copies;
    and for two lists of addresses, of this tile and the next, at the end.
    """
    lists = tokens * (8 + 8 + 4 + 4) + 4 * (tokens * F4_BYTES + LANES_BYTES)
    lists += 2 * tokens * (8 + 8)
    return lists + tokens * (-(-head_size // LANES) + -(-v_head_size // LANES)) * LANES_BYTES


inner_padded, inner_tile_bytes = inner(padded), inner(tile_bytes)
"""For compiled functions."""


@inner
def clear(address: int, num_bytes: int) -> None:
    """Write zeros, whole vectors of them."""
    for at in range(address, address + num_bytes, LANES_BYTES):
        store(at, splat(ZERO))


@inner
def _list_rows(job: Any, item: Any, pages: int, stride: int, size: int, start: int, first: int, stop: int,
               rows: int) -> None:  # fmt: skip
    """List where the keys, or values, of a tile are; for tokens outside of first .. stop, that of `first`."""
    blocks = array_at(job.block_table + item.row * job.table_width * 4, stop // job.block_size + 1, np.int32)
    row = array_at(rows, job.tile_tokens, np.int64)
    token_bytes = job.num_kv_heads * size * job.itemsize
    position = first
    while position < stop:
        column = position // job.block_size
        slot = position - column * job.block_size
        at = pages + np.int64(blocks[column]) * stride * job.itemsize + slot * token_bytes
        end = min(stop, position - slot + job.block_size)
        for place in range(position - start, end - start):
            row[place] = at
            at += token_bytes
        position = end
    for j in range(first - start):
        row[j] = row[first - start]
    for j in range(stop - start, job.tile_tokens):
        row[j] = row[first - start]


@inner
def list_tile(job: Any, item: Any, start: int, first: int, stop: int, rows: int) -> None:
    """List where the keys and values first .. stop are, which are in the tile from position `start` on."""
    _list_rows(job, item, job.key, job.key_stride, job.head_size, start, first, stop, rows)
    rows += job.tile_tokens * 8
    _list_rows(job, item, job.value, job.value_stride, job.v_head_size, start, first, stop, rows)


@inner
def _copy_rows(num: int, rows: int, shift: int, row_bytes: int, whole_bytes: int, copies: int, copied: int) -> None:
    """Copy rows that are not whole vectors, with zeros behind them, and list where these are."""
    row, to = array_at(rows, num, np.int64), array_at(copied, num, np.int64)
    for place in range(num):
        source = array_at(row[place] + shift, row_bytes, np.uint8)
        target = array_at(copies + place * whole_bytes, whole_bytes, np.uint8)
        for i in range(row_bytes):
            target[i] = source[i]
        for i in range(row_bytes, whole_bytes):
            target[i] = 0
        to[place] = copies + place * whole_bytes


@inner
def _list_scales(job: Any, item: Any, scales: int, stride: int, head: int, start: int, first: int, stop: int,
                 to: int) -> None:  # fmt: skip
    """List the scales of one head of a tile, 0 outside of tokens first .. stop."""
    blocks = array_at(job.block_table + item.row * job.table_width * 4, stop // job.block_size + 1, np.int32)
    scale = array_at(to, job.tile_tokens, np.float32)
    for j in range(job.tile_tokens):
        scale[j] = ZERO
    position = first
    while position < stop:
        column = position // job.block_size
        slot = position - column * job.block_size
        page = scales + np.int64(blocks[column]) * stride * F4_BYTES
        page_scales = array_at(page, job.block_size * job.num_kv_heads, np.float32)
        end = min(stop, position - slot + job.block_size)
        for place in range(position - start, end - start):
            scale[place] = page_scales[slot * job.num_kv_heads + head]
            slot += 1
        position = end


@inner
def _weights(scores: int, width: int, first: int, stop: int, key_scales: int, value_scales: int, partial: int,
             factor: int) -> None:  # fmt: skip
    """Turn scores [width] into weights, zeros outside of first .. stop; bring the largest score and the sum of the
    partial result up to date; write the factor on what it had.
    """
    before, top = load(partial), splat(NOTHING)
    for j in range(0, width, LANES):
        at = j * F4_BYTES
        score = load(scores + at)
        if key_scales != 0:
            score = multiply(score, load(key_scales + at))
        score = keep(score, first - j, stop - j, NOTHING)
        store(scores + at, score)
        top = larger(score, top)
    top = larger(splat(largest(top)), before)
    change = exp2(subtract(before, top))
    if first >= stop:
        change = splat(ONE)  # nothing to be seen, perhaps never before
    weights = multiply(load(partial + LANES_BYTES), change)
    for j in range(0, width, LANES):
        at = j * F4_BYTES
        weight = keep(exp2(subtract(load(scores + at), top)), first - j, stop - j, ZERO)
        weights = add(weights, weight)
        if value_scales != 0:
            weight = multiply(weight, load(value_scales + at))
        store(scores + at, weight)
    store(partial, top)
    store(partial + LANES_BYTES, weights)
    store(factor, change)


@inner
def _bring(rows: int, num_rows: int, shift: int, row_bytes: int) -> None:
    """Bring rows near, as the processor cannot guess the next page."""
    row = array_at(rows, num_rows, np.int64)
    for j in range(num_rows):
        for line in range(0, row_bytes, 64):
            prefetch(row[j] + shift + line)


@inner
def _dots(num: int, queries: int, size: int, keys: int, shift: int, num_keys: int, kind: Any, scores: int,
          row_bytes: int) -> None:  # fmt: skip
    """Write the dot products of 1 to 4 queries and a multiple of 4 (of 2 queries: 8, of 1: 16) keys to scores."""
    if num == 4:
        for j in range(0, num_keys, 4):
            dots4(queries, size, keys + 8 * j, shift, kind, scores + F4_BYTES * j, row_bytes)
    elif num == 3:
        for j in range(0, num_keys, 4):
            dots3(queries, size, keys + 8 * j, shift, kind, scores + F4_BYTES * j, row_bytes)
    elif num == 2:
        for j in range(0, num_keys, 8):
            dots2(queries, size, keys + 8 * j, shift, kind, scores + F4_BYTES * j, row_bytes)
    else:
        for j in range(0, num_keys, 16):
            dots1(queries, size, keys + 8 * j, shift, kind, scores + F4_BYTES * j, row_bytes)


@inner
def _weigh(num: int, weights: int, row_bytes: int, values: int, shift: int, num_values: int, size: int, kind: Any,
           factors: int, sums: int, sum_bytes: int) -> None:  # fmt: skip
    """Let the sums [size] of 1 to 4 queries be sums * factors + weights @ values."""
    column = 0
    while column < size:
        if size - column >= 4 * LANES:
            if num == 4:
                weigh4(weights, row_bytes, values, shift, num_values, column, kind, factors, sums, sum_bytes)
            elif num == 3:
                weigh3(weights, row_bytes, values, shift, num_values, column, kind, factors, sums, sum_bytes)
            elif num == 2:
                weigh2(weights, row_bytes, values, shift, num_values, column, kind, factors, sums, sum_bytes)
            else:
                weigh1(weights, row_bytes, values, shift, num_values, column, kind, factors, sums, sum_bytes)
            column += 4 * LANES
        else:
            if num == 4:
                weigh4_16(weights, row_bytes, values, shift, num_values, column, kind, factors, sums, sum_bytes)
            elif num == 3:
                weigh3_16(weights, row_bytes, values, shift, num_values, column, kind, factors, sums, sum_bytes)
            elif num == 2:
                weigh2_16(weights, row_bytes, values, shift, num_values, column, kind, factors, sums, sum_bytes)
            else:
                weigh1_16(weights, row_bytes, values, shift, num_values, column, kind, factors, sums, sum_bytes)
            column += LANES


@inner
def add_tile(job: Any, item: Any, kind: Any, head: int, start: int, first: int, stop: int, rows: int, next_rows: int,
             scratch: int, partials: int) -> None:  # fmt: skip
    """Let the keys first .. stop of one head, in the tile from position `start` on, count for every query.

    Where keys and values are is listed in `rows`; those of the next tile, if any, are brought near meanwhile.
    """
    size, v_size = inner_padded(job.head_size), inner_padded(job.v_head_size)
    width, group = job.tile_tokens, job.heads_per_kv_head
    key_bytes, v_bytes = job.head_size * job.itemsize, job.v_head_size * job.itemsize
    keys, values, shift, v_shift, scales = (
        rows,
        rows + width * 8,
        head * key_bytes,
        head * v_bytes,
        scratch + width * 16,
    )
    scores = scratch + width * 24
    factors, row_bytes, partial_bytes = scores + 4 * width * F4_BYTES, width * F4_BYTES, (2 * LANES + v_size) * F4_BYTES
    copies = factors + 4 * LANES_BYTES
    if size != job.head_size:
        _copy_rows(width, keys, shift, key_bytes, size * job.itemsize, copies, scratch)
        keys, shift = scratch, 0
    if v_size != job.v_head_size:
        copies += width * size * F4_BYTES
        _copy_rows(width, values, v_shift, v_bytes, v_size * job.itemsize, copies, scratch + width * 8)
        values, v_shift = scratch + width * 8, 0
    key_scales = value_scales = 0
    if job.key_scale != 0:
        key_scales, value_scales = scales, scales + width * F4_BYTES
        _list_scales(job, item, job.key_scale, job.key_scale_stride, head, start, first, stop, key_scales)
        _list_scales(job, item, job.value_scale, job.value_scale_stride, head, start, first, stop, value_scales)
    num_pairs = item.num_queries * group  # of a query and one of its heads
    queries = job.query + (head * job.num_tokens + item.token) * group * size * F4_BYTES
    for pair in range(0, num_pairs, 4):
        num = min(4, num_pairs - pair)
        begin = max(first, item.position + pair // group + 1 - job.window) - start
        end = min(stop, item.position + (pair + num - 1) // group + 1) - start
        if begin >= end:
            continue
        begin, end = begin // LANES * LANES, (end + LANES - 1) // LANES * LANES
        partial = partials + (head * num_pairs + pair) * partial_bytes
        for j in range(begin, end, LANES):
            if pair == 0 and next_rows != 0:
                _bring(next_rows + j * 8, LANES, head * key_bytes, key_bytes)
                _bring(next_rows + (width + j) * 8, LANES, head * v_bytes, v_bytes)
            _dots(num, queries + pair * size * F4_BYTES, size, keys + j * 8, shift, LANES, kind,
                  scores + j * F4_BYTES, row_bytes)  # fmt: skip
        for i in range(num):
            position = item.position + (pair + i) // group
            low, high = max(first, position + 1 - job.window) - start, min(stop, position + 1) - start
            _weights(
                scores + i * row_bytes + begin * F4_BYTES, end - begin, low - begin, high - begin,
                key_scales + begin * F4_BYTES if key_scales != 0 else 0,
                value_scales + begin * F4_BYTES if value_scales != 0 else 0,
                partial + i * partial_bytes, factors + i * LANES_BYTES,
            )  # fmt: skip
        _weigh(num, scores + begin * F4_BYTES, row_bytes, values + begin * 8, v_shift, end - begin, v_size, kind,
               factors, partial + 2 * LANES_BYTES, partial_bytes)  # fmt: skip
