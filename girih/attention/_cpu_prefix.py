"""Which rows of a step read the same pages: block table -> items of work whose queries are of several rows. Pure numpy.

Rows that compute one token each, sorted by their pages, so that those with the same leading pages are neighbours:

    positions   0          512         1024
    row 3       |aaaaaaaaaaa|aaaaaa|bbb          one item: rows 3, 0, 7 over a
    row 0       |aaaaaaaaaaa|aaaaaa|cccccccc     one item: rows 3, 0 over the rest of a
    row 7       |aaaaaaaaaaa|dd                  own items go on where shared ones end, at the end of a tile

A row's result is made of the same partitions and tiles, in the same order, as if it had read all of them itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from girih.attention import GroupMetadata
from girih.attention._cpu_tile import ITEM, PART, PARTITION_TOKENS

MAX_ROWS = 32
"""Of one item: what they have in common stays in the cache meanwhile."""

MAX_PARTS = 4096
"""Of all rows: what shared items give is kept until the rows' own items are done."""


@dataclass(frozen=True)
class SharedPrefixes:
    """What some rows of a step read together.

    Args:
        items: ITEM [num_items], each within one partition.
        parts: PART [num_parts], of each row one after the other.
        rows: int64 [num_rows], those that share, with ...
        stop: ... int64 [num_rows], the tokens that shared items read, ...
        first_part: ... int64 [num_rows], their first part, ...
        num_parts: ... int64 [num_rows], their number, the last one perhaps less than a partition.
    """

    items: np.ndarray
    parts: np.ndarray
    rows: np.ndarray
    stop: np.ndarray
    first_part: np.ndarray
    num_parts: np.ndarray


def find_shared(metadata: GroupMetadata, block_size: int, tile_tokens: int) -> SharedPrefixes | None:
    """Find what the rows of a step with one new token have in common; None if they have nothing.

    Args:
        metadata: of the step.
        block_size: tokens per page.
        tile_tokens: what is read together ends at a multiple of so many tokens.
    """
    rows = _rows_with_the_same_first_page(metadata)
    if rows.size == 0:
        return None
    rows, common = _neighbours(metadata, rows, block_size, tile_tokens)
    stop = np.zeros(rows.size, np.int64)
    items, parts, num_items, num_parts = [], [], 0, 0
    for start in range(0, int(common.max()), PARTITION_TOKENS):
        length = _shared_tokens(np.clip(common - start, 0, PARTITION_TOKENS), stop == start)
        if not length.any() or num_parts + np.count_nonzero(length) > MAX_PARTS:
            break
        joined = (common >= start + length[:-1]) & (length[1:] == length[:-1])
        made, of_rows, row_parts = _cut(joined & (length[1:] > 0), length > 0)
        row_parts["item"] += num_items
        made["row"] = rows[made["token"]]
        made["first"], made["stop"] = start, start + length[made["token"]]
        items.append(made)
        parts.append((of_rows, row_parts))
        num_items, num_parts = num_items + made.size, num_parts + row_parts.size
        stop[of_rows] = start + length[of_rows]
    if not items:
        return None
    of_row = np.concatenate([of_rows for of_rows, _ in parts])
    counts = np.bincount(of_row, minlength=rows.size)
    all_items = np.concatenate(items)
    all_items["position"] = all_items["stop"]  # behind all keys: every query sees them
    return SharedPrefixes(
        items=all_items,
        parts=np.concatenate([row_parts for _, row_parts in parts])[np.argsort(of_row, kind="stable")],
        rows=rows,
        stop=stop,
        first_part=np.cumsum(counts) - counts,
        num_parts=counts,
    )


def _rows_with_the_same_first_page(metadata: GroupMetadata) -> np.ndarray:
    rows = np.flatnonzero(np.diff(metadata.query_starts) == 1)
    _, page, counts = np.unique(metadata.block_table[rows, :1], return_inverse=True, return_counts=True)
    return rows[counts[page.ravel()] > 1]


def _neighbours(
    metadata: GroupMetadata, rows: np.ndarray, block_size: int, tile_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows sorted by their pages, and how many leading tokens each shares with the next, in whole tiles."""
    position = metadata.num_computed_tokens[rows]
    table = np.ascontiguousarray(metadata.block_table[rows, : int(position.max()) // block_size + 1])
    order = np.argsort(table.view(np.dtype((np.void, table.strides[0]))).ravel())
    table, position = table[order], position[order]
    same = np.zeros((rows.size - 1, table.shape[1] + 1), bool)
    same[:, :-1] = table[1:] == table[:-1]
    common = np.minimum(same.argmin(axis=1) * block_size, np.minimum(position[1:], position[:-1]))
    return rows[order], common // tile_tokens * tile_tokens


def _shared_tokens(common: np.ndarray, is_open: np.ndarray) -> np.ndarray:
    """Choose how many tokens of a partition each row reads together with neighbours.

    Args:
        common: int64 [num_rows - 1], tokens of the partition that a row has in common with the next.
        is_open: bool [num_rows], rows that read all before the partition together with others.

    Returns:
        int64 [num_rows]: the whole partition where possible, else the length that saves most, else 0.
    """
    common = np.where(is_open[1:] & is_open[:-1], common, 0)
    length = np.zeros(is_open.size, np.int64)
    whole = np.flatnonzero(common == PARTITION_TOKENS)
    length[whole] = length[whole + 1] = PARTITION_TOKENS
    rest = np.where((length[1:] == 0) & (length[:-1] == 0), common, 0)
    lengths, counts = np.unique(rest, return_counts=True)
    saved = lengths * np.cumsum(counts[::-1])[::-1]  # of each length: pairs that have it, or more, in common
    if saved.max() > 0:
        chosen = lengths[saved.argmax()]
        some = np.flatnonzero(rest >= chosen)
        length[some] = length[some + 1] = chosen
    return length


def _cut(joined: np.ndarray, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut rows into items of neighbours.

    Args:
        joined: bool [num_rows - 1], whether a row and the next read the same.
        shares: bool [num_rows], rows that read with others.

    Returns:
        ITEM [num_items], with places of rows as tokens; places of the rows that share; PART of each of them.
    """
    begins = np.concatenate(([True], ~joined))
    place = np.arange(shares.size)
    start = np.maximum.accumulate(np.where(begins, place, 0))
    begins |= (place - start) % MAX_ROWS == 0
    start = np.maximum.accumulate(np.where(begins, place, 0))
    begins &= shares
    of_rows = np.flatnonzero(shares)
    parts = np.zeros(of_rows.size, PART)
    parts["item"] = (np.cumsum(begins) - 1)[of_rows]
    parts["query"] = (place - start)[of_rows]
    items = np.zeros(np.count_nonzero(begins), ITEM)
    items["token"] = np.flatnonzero(begins)
    items["num_queries"] = np.bincount(parts["item"], minlength=items.size)
    parts["num_queries"] = items["num_queries"][parts["item"]]
    return items, of_rows, parts
