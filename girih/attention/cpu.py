"""The backend of the CPU: compiled kernels that read keys and values where they lie, page by page, exactly once.

A step is cut into items of work, see `_cpu_kernel`: up to 16 new tokens of one row each. Rows that hold more than
their share of the step's keys, such as one long context alone, are also cut along the context, so that every thread
has work. Pages that several rows with one new token each have in common, at their beginning, are read once for all of
them, see `_cpu_prefix`. Tokens attend in float32 whatever the dtypes are; a result has the same bits in any batch.

One thing torch does faster: where the processor multiplies bfloat16 matrices itself, rows of many new tokens over a
bfloat16 cache are left to it, as in the reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from girih.attention import GroupMetadata, KVCacheView, reference
from girih.attention._cpu_kernel import (
    ATTEND,
    ITEM,
    JOB,
    PART,
    PARTITION_TOKENS,
    padded,
    partial_bytes,
    scratch_bytes,
    tile_tokens,
)
from girih.attention._cpu_layout import LAY_OUT
from girih.attention._cpu_prefix import SharedPrefixes, find_shared
from girih.attention._cpu_write import COPY, QUANTISE
from girih.device.cpu import multiplies_bfloat16
from girih.kernels.convert import converted
from girih.kernels.threads import float_bits, run, run_rows
from girih.units import round_up

BLOCK_SIZE_MULTIPLE = 1

QUERY_TOKENS = 16
"""Of one item: they share what is read."""

ITEMS_PER_THREAD = 4
"""Rows are cut along the context until there are about so many, as some threads may be slower than others."""

NO_WINDOW = 1 << 62

LOG2_E = math.log2(math.e)

NO_ITEMS, NO_PARTS = np.zeros(0, ITEM), np.zeros(0, PART)


class Items:
    """Items as a kernel takes them.

    Args:
        items: ITEM [num_items].
    """

    def __init__(self, items: np.ndarray):
        self.array = items
        self.num_items = items.size
        self.max_queries = int(items["num_queries"].max(initial=1))
        self.num_threads = min(torch.get_num_threads(), items.size)


class Shape(NamedTuple):
    """What layers of a group may differ in."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    v_head_size: int


class Work:
    """A step of one group and window, ready for each of its layers; another step can take its place.

    Args:
        metadata: of the step.
        cache: of any layer of the group with this window.
        sliding_window: tokens that a query sees, itself included; None sees all before it.
    """

    items: Items
    """What each row reads itself."""

    shared: Items | None
    """What is read before, for several rows at once; None if there never is such a thing."""

    prefills: tuple[reference.PrefillRow, ...]
    """Rows that are left to torch."""

    def __init__(self, metadata: GroupMetadata, cache: KVCacheView, sliding_window: int | None):
        self._sliding_window = sliding_window
        self._jobs: dict[Shape, StepJobs] = {}
        self.take(metadata, cache)

    def take(self, metadata: GroupMetadata, cache: KVCacheView) -> None:
        """Cut a step into items of work; jobs stay where they are."""
        window = self._sliding_window or NO_WINDOW
        num_new = np.diff(metadata.query_starts)
        first = np.maximum(metadata.num_computed_tokens - window + 1, 0)
        may_share = self._sliding_window is None and num_new.size > 1
        shared = None
        if may_share:
            sizes = (cache.tensors[name].shape[-1] for name in ("key", "value"))
            shared = find_shared(metadata, cache.block_size, tile_tokens(*sizes))
        if shared is not None:
            first[shared.rows] = shared.stop
        left = (num_new > QUERY_TOKENS) & _multiplies(cache.tensors["key"].dtype)
        items = _row_items(metadata, np.where(left, 0, num_new), first, window)
        self._order, self._parts = np.arange(metadata.query_starts[-1]), NO_PARTS
        if shared is not None:
            self._order, self._parts = _share(metadata, shared, items), shared.parts
        self.items = Items(items)
        self.shared = Items(NO_ITEMS if shared is None else shared.items) if may_share else None
        self._block_table = np.ascontiguousarray(metadata.block_table)
        self.prefills = tuple(
            reference.prefill_row(metadata, cache.block_size, int(row), int(first[row]), self._sliding_window)
            for row in np.flatnonzero(left)
        )
        self._facts = {
            "num_tokens": self._order.size, "block_size": cache.block_size, "window": window,
            "block_table": self._block_table.ctypes.data, "table_width": self._block_table.shape[1],
            "order": self._order.ctypes.data, "parts": self._parts.ctypes.data,
        }  # fmt: skip
        for shape, jobs in self._jobs.items():
            jobs.fill(shape, self._facts, self.shared, self.items)

    def jobs(self, shape: Shape) -> int:
        """Return the address of the jobs for layers of a shape, JOB [2]: of `shared`, and of `items`."""
        if shape not in self._jobs:
            self._jobs[shape] = StepJobs()
            self._jobs[shape].fill(shape, self._facts, self.shared, self.items)
        return self._jobs[shape].address


class StepJobs:
    """The jobs of a step for layers of one shape, but for what is a layer's own."""

    def __init__(self) -> None:
        self._array = np.zeros(2 * len(JOB.names or ()), np.int64)
        self.address: int = self._array.ctypes.data

    def fill(self, shape: Shape, facts: Mapping[str, int], shared: Items | None, items: Items) -> None:
        """Write both, and make room for what the threads compute."""
        num_heads, num_kv_heads, head_size, v_head_size = shape
        shared_bytes = 0 if shared is None else partial_bytes(shared.max_queries, num_heads, v_head_size)
        one_partial = partial_bytes(items.max_queries, num_heads, v_head_size)
        one_scratch = scratch_bytes(items.max_queries, num_heads, head_size, v_head_size)
        num_shared = 0 if shared is None else shared.num_items
        is_split = bool(items.array["num_split"].any())
        # counters of both, what shared items give, partials and scratch, one behind the other
        sizes = (
            round_up(8 * (2 + num_shared), 64), round_up(8 * (2 + items.num_items), 64), num_shared * shared_bytes,
            one_partial * items.num_items * is_split, one_scratch * torch.get_num_threads(),
        )  # fmt: skip
        self._room = torch.empty(sum(sizes), dtype=torch.uint8)
        counters, own_counters, given, partials, scratch = accumulate(sizes[:-1], initial=self._room.data_ptr())
        both = {
            **facts, "num_kv_heads": num_kv_heads, "heads_per_kv_head": num_heads // num_kv_heads,
            "head_size": head_size, "v_head_size": v_head_size, "tile_tokens": tile_tokens(head_size, v_head_size),
            "shared": given, "shared_bytes": shared_bytes, "partials": partials, "partial_bytes": one_partial,
            "scratch": scratch, "scratch_bytes": one_scratch,
        }  # fmt: skip
        first = {**both, "is_shared": 1, "num_items": num_shared, "counters": counters}
        if shared is not None:
            first["items"] = shared.array.ctypes.data
        second = {**both, "num_items": items.num_items, "items": items.array.ctypes.data, "counters": own_counters}
        self._array[:] = [job.get(name, 0) for job in (first, second) for name in JOB.names or ()]


def write(cache: KVCacheView, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Store new tokens at their slots; see `AttentionBackend.write`."""
    num_tokens, num_heads, _ = key.shape
    kernel, fields = COPY, [slot_mapping.data_ptr(), cache.block_size, num_heads]
    kept = []  # until the kernel has run
    for name, given in (("key", key), ("value", value)):
        pages, scales = cache.tensors[name], cache.tensors.get(f"{name}_scale")
        if scales is not None:
            kernel = QUANTISE
        new = _rows(given, pages.dtype if scales is None else torch.float32)
        kept.append(new)
        fields += (
            new.data_ptr(), new.stride(0) * new.itemsize, pages.data_ptr(), pages.stride(0) * pages.itemsize,
            _address(scales), _page_stride(scales) * torch.float32.itemsize,
            num_heads * given.shape[2] * pages.itemsize,
        )  # fmt: skip
    run_rows(kernel, num_tokens, key.numel() + value.numel(), fields)


def _rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return [num_tokens, heads, size], or [num_tokens, heads * size], in a dtype; the numbers of a token are dense."""
    if x.stride()[1:] != (x.shape[2], 1):
        x = x.contiguous()
    return x if x.dtype is dtype else converted(x.flatten(1), dtype)


def prepare(metadata: GroupMetadata, cache: KVCacheView, sliding_window: int | None) -> Work:
    """Cut a step into items of work; see `AttentionBackend.prepare`."""
    return Work(metadata, cache, sliding_window)


def renew(work: Work, metadata: GroupMetadata, cache: KVCacheView) -> bool:
    """Cut another step into items, in the place of the one before; see `AttentionBackend.renew`."""
    work.take(metadata, cache)
    return not work.prefills


def _row_items(metadata: GroupMetadata, num_new: np.ndarray, first: np.ndarray, window: int) -> np.ndarray:
    """Cut what each row reads itself.

    Args:
        metadata: of the step.
        num_new: int64 [num_rows], tokens that attend.
        first: int64 [num_rows], the first key of each.
        window: tokens that a query sees, itself included.

    Returns:
        ITEM [num_items].
    """
    num_threads = torch.get_num_threads()
    num_keys = metadata.num_computed_tokens + num_new - first
    most = max(1, int((num_new * num_keys).sum()) // (num_threads * ITEMS_PER_THREAD))
    parts = _cdiv(first + num_keys, PARTITION_TOKENS) - first // PARTITION_TOKENS
    is_split = (num_new <= QUERY_TOKENS) & (num_new * num_keys > most) & (parts > 1) & (num_threads > 1)
    # one item for each row, and each 16 of its tokens, and each of its partitions if it is split
    num_items = np.where(is_split, parts, _cdiv(num_new, QUERY_TOKENS))
    row = np.repeat(np.arange(num_new.size), num_items)
    place = np.arange(row.size) - np.repeat(np.cumsum(num_items) - num_items, num_items)
    query = np.where(is_split[row], 0, place * QUERY_TOKENS)
    items = np.zeros(row.size, ITEM)
    items["row"] = row
    items["token"] = metadata.query_starts[row] + query
    items["num_queries"] = np.minimum(num_new[row] - query, QUERY_TOKENS)
    items["position"] = metadata.num_computed_tokens[row] + query
    sees_from = np.maximum(items["position"] - window + 1, first[row])
    partition = (first[row] // PARTITION_TOKENS + place) * PARTITION_TOKENS
    sees_to = items["position"] + items["num_queries"]
    items["first"] = np.where(is_split[row], np.maximum(sees_from, partition), sees_from)
    items["stop"] = np.where(is_split[row], np.minimum(sees_to, partition + PARTITION_TOKENS), sees_to)
    items["split"] = np.arange(row.size) - place
    items["num_split"] = np.where(is_split, parts, 0)[row]
    return items


def _share(metadata: GroupMetadata, shared: SharedPrefixes, items: np.ndarray) -> np.ndarray:
    """Let rows' own items go on where shared ones end; return the tokens in the order in which queries are laid out."""
    tokens = metadata.query_starts[shared.rows]
    order = np.concatenate((tokens, np.delete(np.arange(metadata.query_starts[-1]), tokens)))
    place = np.empty_like(order)
    place[order] = np.arange(order.size)
    items["token"] = place[items["token"]]
    num_rows = metadata.num_computed_tokens.size
    goes_on = shared.stop % PARTITION_TOKENS > 0
    for name, values in (("part", shared.first_part), ("num_parts", shared.num_parts), ("goes_on", goes_on)):
        of_row = np.zeros(num_rows, np.int64)
        of_row[shared.rows] = values
        items[name] = of_row[items["row"]]
    return order


def attend(query: torch.Tensor, cache: KVCacheView, work: Work, scale: float) -> torch.Tensor:
    """Attend from every token of the batch; see `AttentionBackend.attend`."""
    if work.items.num_items:
        output = _attend_items(query, cache, work, scale)
        output = output if output.dtype is query.dtype else converted(output.flatten(1), query.dtype).view(output.shape)
    else:
        output = query.new_empty(*query.shape[:2], cache.tensors["value"].shape[-1])
    for row in work.prefills:
        output[row.tokens] = reference.attend_prefill(query[row.tokens], cache, row, scale)
    return output


def _attend_items(query: torch.Tensor, cache: KVCacheView, work: Work, scale: float) -> torch.Tensor:
    """Return float32 [num_tokens, num_heads, v_head_size], with the outputs of the tokens of items."""
    tensors = cache.tensors
    key, value = tensors["key"], tensors["value"]
    key_scale, value_scale = tensors.get("key_scale"), tensors.get("value_scale")
    num_tokens, num_heads, head_size = query.shape
    _, _, num_kv_heads, v_head_size = value.shape
    query = _rows(query, query.dtype)
    laid_out = torch.empty(num_heads * num_tokens * padded(head_size))
    output = torch.empty(num_tokens, num_heads, v_head_size)
    jobs = torch.empty(2, JOB.itemsize, dtype=torch.uint8)
    at = jobs.data_ptr()
    fields = (
        work.jobs(Shape(num_heads, num_kv_heads, head_size, v_head_size)), at,
        query.data_ptr(), query.stride(0) * query.itemsize, float_bits(scale * LOG2_E),
        laid_out.data_ptr(), output.data_ptr(),
        key.data_ptr(), value.data_ptr(), _address(key_scale), _address(value_scale),
        key.stride(0), value.stride(0), _page_stride(key_scale), _page_stride(value_scale), key.itemsize,
    )  # fmt: skip
    run_rows(LAY_OUT[query.dtype], num_tokens, query.numel(), fields)
    most_threads = torch.get_num_threads()
    if work.shared is not None:
        run(ATTEND[key.dtype], at, work.shared.num_threads, most_threads)
    run(ATTEND[key.dtype], at + JOB.itemsize, work.items.num_threads, most_threads)
    return output


def _multiplies(dtype: torch.dtype) -> bool:
    """Return whether torch's products of such matrices are faster than those of float32."""
    return dtype == torch.bfloat16 and multiplies_bfloat16()


def _address(scales: torch.Tensor | None) -> int:
    return 0 if scales is None else scales.data_ptr()


def _page_stride(scales: torch.Tensor | None) -> int:
    return 0 if scales is None else scales.stride(0)


def _cdiv(a: np.ndarray, b: int) -> np.ndarray:
    return -(-a // b)
