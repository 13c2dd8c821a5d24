"""Storing new keys and values in a paged cache on a CPU, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.kernel import Kernel
from girih.kernels.lanes import array_at, fetch_add, inner

JOB = np.dtype(
    [
        (name, np.int64)
        for name in (
            "num_rows", "rows_at_once",  # tokens
            "slots",  # address: int64 [tokens], page id * block_size + offset
            "block_size", "num_heads",
            *(
                f"{part}{name}"
                for part in ("key_", "value_")
                for name in (
                    "source", "source_bytes",  # address; bytes from token to token
                    "pages", "page_bytes",  # address of page 0; bytes from page to page
                    "scales", "scale_bytes",  # address of page 0, float32; bytes from page to page
                    "row_bytes",  # of all heads of one token, as stored
                )
            ),
            "counter", "taken",  # address of the other; tokens
        )
    ]
)  # fmt: skip

_LARGEST = np.float32(127)


@inner
def _place(slot: int, block_size: int, row_bytes: int, pages: int, page_bytes: int) -> int:
    page = slot // block_size
    return pages + page * page_bytes + (slot - page * block_size) * row_bytes


@inner
def _copy_row(source: int, row_bytes: int, to: int) -> None:
    given, row = array_at(source, row_bytes, np.uint8), array_at(to, row_bytes, np.uint8)
    for i in range(row_bytes):
        row[i] = given[i]


def _copy(job: Any) -> None:
    size, slots = job.block_size, array_at(job.slots, job.num_rows, np.int64)
    first = fetch_add(job.counter, job.rows_at_once)
    while first < job.num_rows:
        for token in range(first, min(first + job.rows_at_once, job.num_rows)):
            to = _place(slots[token], size, job.key_row_bytes, job.key_pages, job.key_page_bytes)
            _copy_row(job.key_source + token * job.key_source_bytes, job.key_row_bytes, to)
            to = _place(slots[token], size, job.value_row_bytes, job.value_pages, job.value_page_bytes)
            _copy_row(job.value_source + token * job.value_source_bytes, job.value_row_bytes, to)
        first = fetch_add(job.counter, job.rows_at_once)


@inner
def _quantise_row(source: int, num_heads: int, row_bytes: int, steps: int, scales: int) -> None:
    """Store float32 heads in steps of max |x| / 127, int8; a NaN makes the scale NaN."""
    size = row_bytes // num_heads
    for head in range(num_heads):
        x, to = array_at(source + head * size * 4, size, np.float32), array_at(steps + head * size, size, np.int8)
        top = np.float32(0)
        for d in range(size):
            magnitude = abs(x[d])
            if not magnitude <= top:
                top = magnitude
        scale = top / _LARGEST
        array_at(scales, num_heads, np.float32)[head] = scale
        divisor = scale if scale > 0 else np.float32(1)
        for d in range(size):
            to[d] = np.int8(max(-_LARGEST, min(_LARGEST, np.rint(x[d] / divisor))))


def _quantise(job: Any) -> None:
    size, heads, slots = job.block_size, job.num_heads, array_at(job.slots, job.num_rows, np.int64)
    first = fetch_add(job.counter, job.rows_at_once)
    while first < job.num_rows:
        for token in range(first, min(first + job.rows_at_once, job.num_rows)):
            to = _place(slots[token], size, job.key_row_bytes, job.key_pages, job.key_page_bytes)
            scales = _place(slots[token], size, heads * 4, job.key_scales, job.key_scale_bytes)
            source = job.key_source + token * job.key_source_bytes
            _quantise_row(source, heads, job.key_row_bytes, to, scales)
            to = _place(slots[token], size, job.value_row_bytes, job.value_pages, job.value_page_bytes)
            scales = _place(slots[token], size, heads * 4, job.value_scales, job.value_scale_bytes)
            source = job.value_source + token * job.value_source_bytes
            _quantise_row(source, heads, job.value_row_bytes, to, scales)
        first = fetch_add(job.counter, job.rows_at_once)


COPY = Kernel(_copy, JOB)
"""Store keys and values of tokens as they are."""

QUANTISE = Kernel(_quantise, JOB)
"""Store float32 keys and values of tokens as int8, one scale for each token and head."""
