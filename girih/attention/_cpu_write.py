"""Storing new keys and values in a paged cache on a CPU, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.kernel import Kernel
from girih.kernels.lanes import array_at, inner

JOB = np.dtype(
    [
        (name, np.int64)
        for name in (
            "slots", "num_tokens",  # address: int64 [num_tokens], page id * block_size + offset
            "source", "source_stride",  # address; bytes from token to token
            "pages", "page_stride",  # address of page 0; bytes from page to page
            "scales", "scale_stride",  # address of page 0, float32; bytes from page to page
            "block_size", "num_heads", "row_bytes",  # row: all heads of one token, as stored
        )
    ]
)  # fmt: skip

_LARGEST = np.float32(127)


@inner
def _place(job: Any, token: int, row_bytes: int, pages: int, page_stride: int) -> int:
    slot = array_at(job.slots, job.num_tokens, np.int64)[token]
    page = slot // job.block_size
    return pages + page * page_stride + (slot - page * job.block_size) * row_bytes


def _copy(job: Any) -> None:
    for token in range(job.num_tokens):
        source = array_at(job.source + token * job.source_stride, job.row_bytes, np.uint8)
        row = array_at(_place(job, token, job.row_bytes, job.pages, job.page_stride), job.row_bytes, np.uint8)
        for i in range(job.row_bytes):
            row[i] = source[i]


@inner
def _quantise_head(source: int, size: int, steps: int, scales: int, head: int) -> None:
    """Store float32 [size] in steps of max |x| / 127, int8; a NaN makes the scale NaN."""
    x, to = array_at(source, size, np.float32), array_at(steps, size, np.int8)
    top = np.float32(0)
    for d in range(size):
        magnitude = abs(x[d])
        if not magnitude <= top:
            top = magnitude
    scale = top / _LARGEST
    array_at(scales, head + 1, np.float32)[head] = scale
    divisor = scale if scale > 0 else np.float32(1)
    for d in range(size):
        to[d] = np.int8(max(-_LARGEST, min(_LARGEST, np.rint(x[d] / divisor))))


def _quantise(job: Any) -> None:
    size = job.row_bytes // job.num_heads
    for token in range(job.num_tokens):
        source = job.source + token * job.source_stride
        row = _place(job, token, job.row_bytes, job.pages, job.page_stride)
        scales = _place(job, token, job.num_heads * 4, job.scales, job.scale_stride)
        for head in range(job.num_heads):
            _quantise_head(source + head * size * 4, size, row + head * size, scales, head)


COPY = Kernel(_copy, JOB)
"""Store tokens as they are."""

QUANTISE = Kernel(_quantise, JOB)
"""Store float32 tokens as int8, one scale for each token and head."""
