"""Getting a layer ready to attend, compiled: queries as `_cpu_kernel` reads them, and what its jobs say.

What a step has for all its layers, such as items of work, is in two jobs (`JOB`) that the step has filled in: of what
rows share, and of what each reads itself. A layer's own jobs are copies of them, with its addresses. They are copied
here, not in Python, so that the same calls with other jobs in the same place compute another step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from girih.attention._cpu_tile import F4_BYTES, JOB, inner_padded
from girih.kernels.kernel import Kernel
from girih.kernels.lanes import LANES, array_at, bytes_of, fetch_add, inner, load_some, multiply, splat, store

LAYER = ("key", "value", "key_scale", "value_scale",
         "key_stride", "value_stride", "key_scale_stride", "value_scale_stride", "itemsize")  # fmt: skip
"""Fields of `JOB` that are a layer's own, beside its queries and output."""

LAYOUT = np.dtype(
    [
        (name, np.float64 if name == "scale" else np.int64)
        for name in (
            "num_rows", "rows_at_once",  # tokens
            "step", "jobs",  # addresses: JOB [2], what rows share and what they read themselves
            "query", "query_bytes",  # address [tokens, heads, head size]; bytes from token to token
            "scale",  # of queries, in units of log2
            "laid_out", "output",  # addresses, as in JOB
            *LAYER,
            "counter", "taken",  # address of the other; tokens
        )
    ]
)  # fmt: skip

_WORDS = JOB.itemsize // 8


@inner
def _make_jobs(layout: Any) -> None:
    """Copy the step's jobs, put in what is the layer's, and let counting begin."""
    step, words = array_at(layout.step, 2 * _WORDS, np.int64), array_at(layout.jobs, 2 * _WORDS, np.int64)
    for i in range(2 * _WORDS):
        words[i] = step[i]
    jobs = array_at(layout.jobs, 2, JOB)
    for i in range(2):
        job = jobs[i]
        job.query, job.output = layout.laid_out, layout.output
        job.key, job.value = layout.key, layout.value
        job.key_scale, job.value_scale = layout.key_scale, layout.value_scale
        job.key_stride, job.value_stride = layout.key_stride, layout.value_stride
        job.key_scale_stride, job.value_scale_stride = layout.key_scale_stride, layout.value_scale_stride
        job.itemsize = layout.itemsize
        counters = array_at(job.counters, 2 + job.num_items, np.int64)
        for j in range(2 + job.num_items):
            counters[j] = 0


@inner
def _lay_out_token(layout: Any, job: Any, place: int, kind: Any) -> None:
    """Write the queries of the token that has a place: float32, scaled, in whole vectors, by key head."""
    size, group = job.head_size, job.heads_per_kv_head
    room = inner_padded(size) * F4_BYTES
    scale = splat(np.float32(layout.scale))
    token = array_at(job.order, job.num_tokens, np.int64)[place]
    for head in range(job.num_kv_heads * group):
        query = layout.query + token * layout.query_bytes + head * size * bytes_of(kind)
        to = layout.laid_out + ((head // group * job.num_tokens + place) * group + head % group) * room
        for d in range(0, size, LANES):
            numbers = load_some(query + d * bytes_of(kind), size - d, kind)
            store(to + d * F4_BYTES, multiply(numbers, scale))


@inner
def _lay_out(layout: Any, kind: Any) -> None:
    """Take tokens until none is left; who takes the first makes the jobs, too."""
    job = array_at(layout.step, 2, JOB)[1]
    first = fetch_add(layout.counter, layout.rows_at_once)
    if first == 0:
        _make_jobs(layout)
    while first < layout.num_rows:
        for place in range(first, min(first + layout.rows_at_once, layout.num_rows)):
            _lay_out_token(layout, job, place, kind)
        first = fetch_add(layout.counter, layout.rows_at_once)


def _lay_out_float32(layout: Any) -> None:
    _lay_out(layout, np.float32)


def _lay_out_bfloat16(layout: Any) -> None:
    _lay_out(layout, np.uint16)


LAY_OUT = {torch.float32: Kernel(_lay_out_float32, LAYOUT), torch.bfloat16: Kernel(_lay_out_bfloat16, LAYOUT)}
"""By the queries' dtype."""
