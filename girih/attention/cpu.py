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
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from girih.attention import GroupMetadata, KVCacheView, reference
from girih.attention._cpu_kernel import (
    ATTEND,
    ITEM,
    PART,
    PARTITION_TOKENS,
    padded,
    partial_bytes,
    scratch_bytes,
    tile_tokens,
)
from girih.attention._cpu_prefix import SharedPrefixes, find_shared
from girih.attention._cpu_write import COPY, QUANTISE
from girih.device.cpu import multiplies_bfloat16
from girih.kernels.threads import run, run_brief

BLOCK_SIZE_MULTIPLE = 1

QUERY_TOKENS = 16
"""Of one item: they share what is read."""

ITEMS_PER_THREAD = 4
"""Rows are cut along the context until there are about so many, as some threads may be slower than others."""

NO_WINDOW = 1 << 62

BRIEF_TOKENS = 64
"""So few are written in microseconds."""


class Items:
    """Items as a kernel takes them.

    Args:
        items: ITEM [num_items].
    """

    def __init__(self, items: np.ndarray):
        self.bytes = torch.from_numpy(items.view(np.uint8))
        self.num_items = items.size
        self.max_queries = int(items["num_queries"].max(initial=1))
        self.num_threads = max(1, min(torch.get_num_threads(), items.size))


@dataclass(frozen=True)
class Work:
    """A step of one group and window, ready for each of its layers.

    Args:
        items: what each row reads itself.
        shared: what is read before, for several rows at once; None if there is nothing.
        parts: the bytes of `PART`: what each row gets from shared items.
        order: int64 [num_tokens], tokens in the order in which their queries are laid out.
        is_split: whether any row is cut along the context.
        block_table: int32 [num_rows, width].
        window: tokens that a query sees, itself included.
        prefills: rows that are left to torch.
    """

    items: Items
    shared: Items | None
    parts: torch.Tensor
    order: torch.Tensor
    is_split: bool
    block_table: torch.Tensor
    window: int
    prefills: tuple[reference.PrefillRow, ...]


def write(cache: KVCacheView, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Store new tokens at their slots; see `AttentionBackend.write`."""
    for name, given in (("key", key), ("value", value)):
        pages, scales = cache.tensors[name], cache.tensors.get(f"{name}_scale")
        dtype = pages.dtype if scales is None else torch.float32
        new = given if given.dtype == dtype else given.to(dtype)  # a call for nothing takes longer than to ask
        num_tokens, num_heads, size = new.shape
        stride, head_stride, one = new.stride()
        if (head_stride, one) != (size, 1):
            new = new.contiguous()
            stride = num_heads * size
        fields = (
            slot_mapping.data_ptr(), num_tokens,
            new.data_ptr(), stride * dtype.itemsize,
            pages.data_ptr(), pages.stride(0) * pages.itemsize,
            _address(scales), _page_stride(scales) * torch.float32.itemsize,
            cache.block_size, num_heads, num_heads * size * pages.itemsize,
        )  # fmt: skip
        (run_brief if num_tokens <= BRIEF_TOKENS else run)(COPY if scales is None else QUANTISE, fields)


def prepare(metadata: GroupMetadata, cache: KVCacheView, sliding_window: int | None) -> Work:
    """Cut a step into items of work; see `AttentionBackend.prepare`."""
    window = sliding_window or NO_WINDOW
    shared = None
    if sliding_window is None:
        sizes = (cache.tensors[name].shape[-1] for name in ("key", "value"))
        shared = find_shared(metadata, cache.block_size, tile_tokens(*sizes))
    num_new = np.diff(metadata.query_starts)
    first = np.maximum(metadata.num_computed_tokens - window + 1, 0)
    if shared is not None:
        first[shared.rows] = shared.stop
    left = (num_new > QUERY_TOKENS) & _multiplies(cache.tensors["key"].dtype)
    items = _row_items(metadata, np.where(left, 0, num_new), first, window)
    order = np.arange(metadata.query_starts[-1])
    parts = np.zeros(0, PART)
    if shared is not None:
        order, parts = _share(metadata, shared, items), shared.parts
    return Work(
        items=Items(items),
        shared=None if shared is None else Items(shared.items),
        parts=torch.from_numpy(parts.view(np.uint8)),
        order=torch.from_numpy(order),
        is_split=bool((items["num_split"] > 0).any()),
        block_table=torch.from_numpy(np.ascontiguousarray(metadata.block_table)),
        window=window,
        prefills=tuple(
            reference.prefill_row(metadata, cache.block_size, int(row), int(first[row]), sliding_window)
            for row in np.flatnonzero(left)
        ),
    )


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
        output = output if output.dtype == query.dtype else output.to(query.dtype)
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
    if work.shared is not None:
        query = query[work.order]
    queries = _queries(query, num_kv_heads, scale)
    output = torch.empty(num_tokens, num_heads, v_head_size)
    shared_bytes = 0 if work.shared is None else partial_bytes(work.shared.max_queries, num_heads, v_head_size)
    one_partial = partial_bytes(work.items.max_queries, num_heads, v_head_size)
    one_scratch = scratch_bytes(work.items.max_queries, num_heads, head_size, v_head_size)
    # what shared items give, partials and scratch, one behind the other
    partials = 0 if work.shared is None else work.shared.num_items * shared_bytes
    scratch = partials + (one_partial * work.items.num_items if work.is_split else 0)
    room = torch.empty(scratch + one_scratch * torch.get_num_threads(), dtype=torch.uint8)
    given = room.data_ptr()
    for items in (work.shared, work.items):
        if items is None:
            continue
        counters = torch.zeros(2 + items.num_items, dtype=torch.int64)
        fields = (
            queries.data_ptr(), output.data_ptr(),
            key.data_ptr(), value.data_ptr(), _address(key_scale), _address(value_scale),
            key.stride(0), value.stride(0), _page_stride(key_scale), _page_stride(value_scale),
            num_tokens, key.itemsize, cache.block_size, num_kv_heads, num_heads // num_kv_heads, head_size, v_head_size,
            work.window, tile_tokens(head_size, v_head_size), work.block_table.data_ptr(), work.block_table.shape[1],
            items.bytes.data_ptr(), items.num_items, work.order.data_ptr(),
            items is work.shared, work.parts.data_ptr(), given, shared_bytes, counters.data_ptr(),
            given + partials, one_partial, given + scratch, one_scratch,
        )  # fmt: skip
        run(ATTEND[key.dtype], fields, items.num_threads)
    return output


def _queries(query: torch.Tensor, num_kv_heads: int, scale: float) -> torch.Tensor:
    """Return queries as the kernel takes them: float32, in units of log2, in whole vectors, by key head.

    Returns:
        [num_kv_heads, num_tokens, heads of each, padded head size].
    """
    queries = (query if query.dtype == torch.float32 else query.to(torch.float32)) * (scale * math.log2(math.e))
    if missing := padded(query.shape[-1]) - query.shape[-1]:
        queries = nn.functional.pad(queries, (0, missing))
    num_tokens, num_heads, size = queries.shape
    return queries.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, size).transpose(0, 1).contiguous()


def _multiplies(dtype: torch.dtype) -> bool:
    """Return whether torch's products of such matrices are faster than those of float32."""
    return dtype == torch.bfloat16 and multiplies_bfloat16()


def _address(scales: torch.Tensor | None) -> int:
    return 0 if scales is None else scales.data_ptr()


def _page_stride(scales: torch.Tensor | None) -> int:
    return 0 if scales is None else scales.stride(0)


def _cdiv(a: np.ndarray, b: int) -> np.ndarray:
    return -(-a // b)
