"""The reference backend: plain torch, runs everywhere, and is the truth in tests.

Pages are gathered into dense K and V, then torch's scaled_dot_product_attention does the rest. Rows that compute
one token (decode) go in padded batches of similar length; rows that compute more (prefill) go one by one, in
tiles of queries. Batches and tiles have a fixed size limit, so that memory does not grow with the number of rows.

    page columns of a row      | 0 | 1 | 2 | 3 | 4 | 5 |        window of the first query: from column 2
    gathered                           | 2 | 3 | 4 | 5 |
    live                                ..xxxxxxxxxxx...         tokens first_live .. num_computed + num_new
    what is not live is cut off (prefill) or set to zero (decode) before anything multiplies it

An int8 cache holds x as round(x / scale) with scale = max |x| / 127 over the elements of one token and head, so that
no element is off by more than half a scale. What is gathered is multiplied by its scales before all else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from girih.attention import GroupMetadata, KVCacheView
from girih.units import MIB, cdiv

BLOCK_SIZE_MULTIPLE = 1

# bytes of K, or of V, gathered at once for a batch of decode rows; one row may take more
DECODE_GATHER_BYTES = 8 * MIB
# rows in one decode batch are at least this share as long as its longest, so that padding stays below one half
DECODE_LENGTH_RATIO = 0.5
# elements of one mask, queries x query heads per key head x keys
MASK_ELEMENTS = 1 << 22

INT8_MAX = 127


@dataclass(frozen=True)
class DecodeBatch:
    """Decode rows of similar length, padded to the longest.

    Args:
        tokens: int64 [b], their places in the flat batch.
        block_ids: int64 [b * num_columns], gathered pages; padding repeats the row's last page.
        mask: bool [b, 1, num_columns * block_size], True where the slot holds a token that the query sees.
        dead_slots: int64 [m], flat indices into [b * num_columns * block_size] where mask is False.
    """

    tokens: torch.Tensor
    block_ids: torch.Tensor
    mask: torch.Tensor
    dead_slots: torch.Tensor


@dataclass(frozen=True)
class PrefillRow:
    """A row that computes several tokens.

    Args:
        tokens: its tokens in the flat batch.
        block_ids: int64 [num_columns], pages that hold tokens first_live .. num_computed + num_new.
        skip: slots of the first gathered page before `first_live`.
        first_live: position of the first token that any query sees.
        num_computed: position of the first query.
        sliding_window: tokens that a query sees, itself included; None sees all.
    """

    tokens: slice
    block_ids: torch.Tensor
    skip: int
    first_live: int
    num_computed: int
    sliding_window: int | None


@dataclass(frozen=True)
class Work:
    """A step of one group and window, ready for each of its layers."""

    decodes: tuple[DecodeBatch, ...]
    prefills: tuple[PrefillRow, ...]


def write(cache: KVCacheView, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Store new tokens at their slots; see `AttentionBackend.write`."""
    slots = (slot_mapping // cache.block_size, slot_mapping % cache.block_size)
    for name, new in (("key", key), ("value", value)):
        scales = cache.tensors.get(f"{name}_scale")
        if scales is None:
            cache.tensors[name].index_put_(slots, new)
        else:
            steps, scale = _quantise(new)
            cache.tensors[name].index_put_(slots, steps)
            scales.index_put_(slots, scale)


def prepare(metadata: GroupMetadata, cache: KVCacheView, sliding_window: int | None) -> Work:
    """Sort rows into decode batches and prefill rows and list the pages each needs; see `AttentionBackend.prepare`."""
    num_new = np.diff(metadata.query_starts)
    first_live = np.zeros_like(metadata.num_computed_tokens)
    if sliding_window is not None:
        first_live = np.maximum(metadata.num_computed_tokens - sliding_window + 1, 0)
    decodes = np.flatnonzero(num_new == 1)
    prefills = np.flatnonzero(num_new > 1)
    return Work(
        tuple(_decode_batches(metadata, cache, decodes, first_live)),
        tuple(
            prefill_row(metadata, cache.block_size, int(row), int(first_live[row]), sliding_window) for row in prefills
        ),
    )


def renew(_work: Work, _metadata: GroupMetadata, _cache: KVCacheView) -> bool:
    """Return False: what torch computes is not replayed; see `AttentionBackend.renew`."""
    return False


def attend(query: torch.Tensor, cache: KVCacheView, work: Work, scale: float) -> torch.Tensor:
    """Attend from every token of the batch; see `AttentionBackend.attend`."""
    output = query.new_empty(*query.shape[:2], cache.tensors["value"].shape[-1])
    for batch in work.decodes:
        num_rows = batch.tokens.numel()
        key, value = (
            _gather(cache, name, batch.block_ids, query.dtype)
            .index_fill_(0, batch.dead_slots, 0)
            .unflatten(0, (num_rows, -1))
            for name in ("key", "value")
        )
        output[batch.tokens] = _attend_dense(query[batch.tokens].unsqueeze(1), key, value, batch.mask, scale).squeeze(1)
    for row in work.prefills:
        output[row.tokens] = attend_prefill(query[row.tokens], cache, row, scale)
    return output


def _decode_batches(
    metadata: GroupMetadata, cache: KVCacheView, rows: np.ndarray, first_live: np.ndarray
) -> list[DecodeBatch]:
    """Cut the decode rows, longest first, into batches of similar length and bounded size."""
    first_column = first_live // cache.block_size
    num_columns = metadata.num_computed_tokens // cache.block_size + 1 - first_column
    rows = rows[np.argsort(-num_columns[rows], kind="stable")]
    page_bytes = max(_gathered_bytes(cache, name) for name in ("key", "value"))
    batches = []
    start = 0
    while start < rows.size:
        width = int(num_columns[rows[start]])
        similar = np.searchsorted(-num_columns[rows], -width * DECODE_LENGTH_RATIO, side="right")
        stop = min(int(similar), start + max(1, DECODE_GATHER_BYTES // (width * page_bytes)))
        batches.append(_decode_batch(metadata, cache.block_size, rows[start:stop], first_live, width))
        start = stop
    return batches


def _decode_batch(
    metadata: GroupMetadata, block_size: int, rows: np.ndarray, first_live: np.ndarray, width: int
) -> DecodeBatch:
    position = metadata.num_computed_tokens[rows, None]
    live_from = first_live[rows, None]
    first_column = live_from // block_size
    columns = np.minimum(first_column + np.arange(width), position // block_size)
    slot_position = first_column * block_size + np.arange(width * block_size)
    seen = (slot_position >= live_from) & (slot_position <= position)
    return DecodeBatch(
        tokens=torch.from_numpy(metadata.query_starts[rows]),
        block_ids=torch.from_numpy(metadata.block_table[rows[:, None], columns].astype(np.int64).ravel()),
        mask=torch.from_numpy(seen).unsqueeze(1),
        dead_slots=torch.from_numpy(np.flatnonzero(~seen)),
    )


def prefill_row(
    metadata: GroupMetadata, block_size: int, row: int, first_live: int, sliding_window: int | None
) -> PrefillRow:
    """Say where row `row` of a step has its tokens, from position `first_live` on."""
    start, stop = (int(bound) for bound in metadata.query_starts[row : row + 2])
    num_computed = int(metadata.num_computed_tokens[row])
    first_column = first_live // block_size
    last_column = cdiv(num_computed + stop - start, block_size)
    return PrefillRow(
        tokens=slice(start, stop),
        block_ids=torch.from_numpy(metadata.block_table[row, first_column:last_column].astype(np.int64)),
        skip=first_live - first_column * block_size,
        first_live=first_live,
        num_computed=num_computed,
        sliding_window=sliding_window,
    )


def attend_prefill(query: torch.Tensor, cache: KVCacheView, row: PrefillRow, scale: float) -> torch.Tensor:
    """Attend from one row's new tokens, a tile of queries at a time: [num_new, num_heads, v_head_size]."""
    num_new = query.shape[0]
    live = slice(row.skip, row.skip + row.num_computed + num_new - row.first_live)
    key, value = (_gather(cache, name, row.block_ids, query.dtype)[live] for name in ("key", "value"))
    queries_per_key = query.shape[1] // key.shape[1]
    tile = max(16, MASK_ELEMENTS // (key.shape[0] * queries_per_key))
    outputs = []
    for start in range(0, num_new, tile):
        stop = min(start + tile, num_new)
        query_position = torch.arange(row.num_computed + start, row.num_computed + stop).unsqueeze(1)
        first = row.first_live
        if row.sliding_window is not None:
            first = max(first, row.num_computed + start - row.sliding_window + 1)
        last = row.num_computed + stop
        key_position = torch.arange(first, last)
        seen = key_position <= query_position
        if row.sliding_window is not None:
            seen &= key_position > query_position - row.sliding_window
        keys = slice(first - row.first_live, last - row.first_live)
        tile_output = _attend_dense(query[None, start:stop], key[None, keys], value[None, keys], seen[None], scale)
        outputs.append(tile_output[0])
    return torch.cat(outputs)


def _gather(cache: KVCacheView, name: str, block_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Copy whole pages of "key" or "value", quantised ones turned back: [len(block_ids) * block_size, heads, size]."""
    gathered = _gather_pages(cache.tensors[name], block_ids)
    if (scales := cache.tensors.get(f"{name}_scale")) is None:
        return gathered
    return (gathered * _gather_pages(scales, block_ids).unsqueeze(-1)).to(dtype)


def _gather_pages(pages: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """Copy whole pages: [num_pages, block_size, ...] -> [len(block_ids) * block_size, ...]."""
    # each page is dense, so two dimensions are enough, which index_select copies ten times faster than four
    flat = pages.view(pages.shape[0], -1).index_select(0, block_ids)
    return flat.view(-1, *pages.shape[2:])


def _gathered_bytes(cache: KVCacheView, name: str) -> int:
    """Return the bytes of one page of "key" or "value" once gathered; quantised ones become float32 on the way."""
    page = cache.tensors[name][0]
    return page.nbytes if f"{name}_scale" not in cache.tensors else page.numel() * torch.float32.itemsize


def _quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x as int8 [num_tokens, heads, size], and its scales, float32 [num_tokens, heads]; of zeros it is 0."""
    scale = x.abs().amax(-1).float() / INT8_MAX
    steps = x.float() / scale.masked_fill(scale == 0, 1).unsqueeze(-1)
    return steps.round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8), scale


def _attend_dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend with grouped query heads over dense K and V.

    Args:
        query: [batch, num_queries, num_heads, head_size].
        key: [batch, num_keys, num_kv_heads, head_size]; heads kv * g .. kv * g + g - 1 of the query share head kv.
        value: [batch, num_keys, num_kv_heads, v_head_size].
        mask: bool [batch, num_queries, num_keys], True where a query sees a key.
        scale: factor on the dot products.

    Returns:
        [batch, num_queries, num_heads, v_head_size].
    """
    batch, num_queries, num_heads, _ = query.shape
    num_kv_heads = key.shape[2]
    group = num_heads // num_kv_heads
    # the query heads that share a key head become more queries of that head: K and V are never repeated
    folded = query.unflatten(2, (num_kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    output = nn.functional.scaled_dot_product_attention(
        folded, key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask.repeat(1, group, 1).unsqueeze(1), scale=scale
    )
    output = output.unflatten(2, (group, num_queries)).permute(0, 3, 1, 2, 4)
    return output.reshape(batch, num_queries, num_heads, value.shape[-1])
