"""Paged attention on a CPU, compiled: queries of one row over its pages, in one pass with an online softmax.

    positions   0              512             1024        1300
                |  partition    |  partition    | partition |
                |t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|      tiles: keys and values of one head as dense float32

A tile serves every query of the item and all query heads that share its head. What a partition gives (largest score,
sum of weights, weighted values) is merged, partition by partition, into what those before it gave. Tiles and partitions
are cut at fixed positions, so that a token's result has the same bits whatever else is in the batch, however its row
was cut into steps and items, and whatever number of threads there is.

An item of work is a few queries over some partitions. Items of a row that is split have one partition each, and who
ends the last of them merges them all, in order. Items that rows share are done before all others: queries of several
rows over a partition, or its beginning; the rows' own items merge what these gave, and go on with the last of it.
Scores are in units of log2, so that the exponential is a power of two.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from girih.attention._cpu_tile import (
    F4_BYTES,
    ITEM,
    JOB,
    LANES_BYTES,
    NOTHING,
    PART,
    PARTITION_TOKENS,
    add_tile,
    clear,
    inner_padded,
    inner_tile_bytes,
    list_tile,
    padded,
    tile_bytes,
    tile_tokens,
)
from girih.kernels.kernel import Kernel
from girih.kernels.lanes import (
    LANES,
    array_at,
    exp2,
    fetch_add,
    inner,
    larger,
    load,
    multiply,
    multiply_add,
    splat,
    store,
    subtract,
    total,
)


def partial_bytes(num_queries: int, num_heads: int, v_head_size: int) -> int:
    """Return the bytes of what a partition gives: for each query and head 16 times score and sum, and values."""
    return num_queries * num_heads * (2 * LANES + padded(v_head_size)) * F4_BYTES


def scratch_bytes(num_queries: int, num_heads: int, head_size: int, v_head_size: int) -> int:
    """Return the bytes a thread needs: keys, values and scores of a tile, and two results of items so large."""
    tokens = tile_tokens(head_size, v_head_size)
    return tile_bytes(tokens, head_size, v_head_size) + 2 * partial_bytes(num_queries, num_heads, v_head_size)


@inner
def _start(partials: int, num_partials: int, v_size: int) -> None:
    """Make partial results those of no key."""
    for i in range(num_partials):
        partial = partials + i * (2 * LANES + v_size) * F4_BYTES
        store(partial, splat(NOTHING))
        clear(partial + LANES_BYTES, LANES_BYTES + v_size * F4_BYTES)


@inner
def _shared_partials(job: Any, part: int, head: int, partial_bytes: int) -> int:
    """Return where a row's results of a shared item and key head are."""
    given = array_at(job.parts, part + 1, PART)[part]
    place = (head * given.num_queries + given.query) * job.heads_per_kv_head
    return job.shared + given.item * job.shared_bytes + place * partial_bytes


@inner
def _merge(results: int, partials: int, num_partials: int, v_size: int) -> None:
    """Bring results up to date with those of the next partition."""
    for i in range(num_partials):
        at = i * (2 * LANES + v_size) * F4_BYTES
        result, partial = results + at, partials + at
        if array_at(partial, 1, np.float32)[0] == NOTHING:
            continue  # the query sees none of its keys
        before, score = load(result), load(partial)
        top = larger(before, score)
        old, new = exp2(subtract(before, top)), exp2(subtract(score, top))
        store(result, top)
        for d in range(LANES_BYTES, 2 * LANES_BYTES + v_size * F4_BYTES, LANES_BYTES):
            sums = multiply(load(result + d), old)
            store(result + d, multiply_add(load(partial + d), new, sums))


@inner
def _finish(job: Any, item: Any, results: int) -> None:
    """Write the outputs of an item's queries."""
    v_size, group = inner_padded(job.v_head_size), job.heads_per_kv_head
    num_pairs = item.num_queries * group
    order = array_at(job.order, job.num_tokens, np.int64)
    for i in range(num_pairs * job.num_kv_heads):
        head, pair = i // num_pairs, i % num_pairs
        result = results + i * (2 * LANES + v_size) * F4_BYTES
        weights = total(load(result + LANES_BYTES))
        values = array_at(result + 2 * LANES_BYTES, job.v_head_size, np.float32)
        place = (order[item.token + pair // group] * job.num_kv_heads + head) * group + pair % group
        output = array_at(job.output + place * job.v_head_size * F4_BYTES, job.v_head_size, np.float32)
        for d in range(job.v_head_size):
            output[d] = values[d] / weights


@inner
def _start_results(job: Any, item: Any, results: int) -> None:
    """Make results those of the whole partitions that others have computed."""
    v_size, group = inner_padded(job.v_head_size), job.heads_per_kv_head
    partial_bytes = (2 * LANES + v_size) * F4_BYTES
    _start(results, item.num_queries * group * job.num_kv_heads, v_size)
    for part in range(item.part, item.part + item.num_parts - item.goes_on):
        for head in range(job.num_kv_heads):
            at = results + head * group * partial_bytes
            _merge(at, _shared_partials(job, part, head, partial_bytes), group, v_size)


@inner
def _start_partition(job: Any, item: Any, first: int, partials: int) -> None:
    """Make partial results those of what others have computed of a partition: of the keys before `first`, if any."""
    v_size, group = inner_padded(job.v_head_size), job.heads_per_kv_head
    if not item.goes_on or first % PARTITION_TOKENS == 0:
        _start(partials, item.num_queries * group * job.num_kv_heads, v_size)
        return
    num_bytes = group * (2 * LANES + v_size) * F4_BYTES
    for head in range(job.num_kv_heads):
        given = _shared_partials(job, item.part + item.num_parts - 1, head, (2 * LANES + v_size) * F4_BYTES)
        for at in range(0, num_bytes, LANES_BYTES):
            store(partials + head * num_bytes + at, load(given + at))


@inner
def _partition(job: Any, item: Any, kind: Any, first: int, stop: int, scratch: int, partials: int) -> None:
    """Compute what keys first .. stop, of one partition, give to the item's queries."""
    width = job.tile_tokens
    list_bytes = width * (8 + 8)
    lists = scratch + inner_tile_bytes(width, job.head_size, job.v_head_size) - 2 * list_bytes
    listed = -1
    _start_partition(job, item, first, partials)
    while first < stop:
        start = first // width * width
        rows = lists + start // width % 2 * list_bytes
        if listed != start:
            list_tile(job, item, start, first, min(stop, start + width), rows)
        listed, next_rows = start + width, 0
        if listed < item.stop:
            next_rows = lists + listed // width % 2 * list_bytes
            list_tile(job, item, listed, listed, min(item.stop, listed + width), next_rows)
        for head in range(job.num_kv_heads):
            add_tile(job, item, kind, head, start, first, min(stop, start + width), rows, next_rows, scratch, partials)
        first = start + width


@inner
def _item(job: Any, items: Any, index: int, kind: Any, scratch: int, room: int) -> None:
    """Compute one item; `room` holds two results."""
    item = items[index]
    v_size, num_heads = inner_padded(job.v_head_size), job.heads_per_kv_head * job.num_kv_heads
    num_partials = item.num_queries * num_heads
    num_bytes = num_partials * (2 * LANES + v_size) * F4_BYTES
    if job.is_shared:
        _partition(job, item, kind, item.first, item.stop, scratch, job.shared + index * job.shared_bytes)
        return
    if item.num_split:
        _partition(job, item, kind, item.first, item.stop, scratch, job.partials + index * job.partial_bytes)
        if fetch_add(job.counters + (2 + item.split) * 8, 1) + 1 < item.num_split:
            return
        _start_results(job, item, room)
        for other in range(item.split, item.split + item.num_split):
            _merge(room, job.partials + other * job.partial_bytes, num_partials, v_size)
    else:
        _start_results(job, item, room)
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
    scratch = job.scratch + fetch_add(job.counters, 1) * job.scratch_bytes
    room = scratch + inner_tile_bytes(job.tile_tokens, job.head_size, job.v_head_size)
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
