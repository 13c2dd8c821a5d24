"""The pool as a picture shows it: which group has each slab, and who holds each page. A snapshot in a few arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from girih.errors import RequestError
from girih.kv import pool_state as p
from girih.kv import state as s
from girih.kv.state import ManagerState

FREE, CACHED = -1, -2
"""In `GroupMap.rows`: a page that holds nothing, and one that only the prefix cache holds."""

NOBODY = -1
"""In `ClassMap.owners`: a slab that no group has borrowed."""

MOST_HOLDERS = (1 << 16) - 1


@dataclass(frozen=True)
class GroupMap:
    """The pages of the slabs that a group has borrowed, slabs in order.

    Args:
        rows: int32 [slabs, pages per slab]; the row that holds each page, the first of several; `FREE` or `CACHED`.
        num_holders: uint16 [slabs, pages per slab]; how many rows hold each page.
    """

    rows: np.ndarray
    num_holders: np.ndarray


@dataclass(frozen=True)
class ClassMap:
    """The pool of one stage class.

    Args:
        owners: int16 [slabs]; the group that has borrowed each slab, or `NOBODY`.
        groups: group -> its pages; row i is the i-th of the slabs that it owns.
    """

    owners: np.ndarray
    groups: dict[int, GroupMap]


@dataclass(frozen=True)
class PageUse:
    """What a row has a page for.

    Args:
        row: the row.
        first_token: of the row's sequence, the first token that the page has something of; for a recurrent state, which
            has something of all tokens up to one, the first of the last unit of them.
        end_token: the first token behind that; no token for a page of an encoder.
    """

    row: int
    first_token: int
    end_token: int


def map_pool(state: ManagerState) -> tuple[ClassMap, ...]:
    """Return what the pages of all stage classes are used for now.

    Args:
        state: the manager's.
    """
    return tuple(_map_class(state, record) for record in state.pool.classes)


def find_page(state: ManagerState, group: int, page: int) -> tuple[bool, tuple[PageUse, ...]]:
    """Return whether a later prompt can find a page, and what rows hold it for, in the order of the rows.

    Args:
        state: the manager's.
        group: the group.
        page: the page's id in the group.

    Raises:
        RequestError: there is no such page.
    """
    if not 0 <= group < len(state.groups):
        raise RequestError(f"there is no group {group}: the groups of layers are 0 to {len(state.groups) - 1}")
    record = state.pool.groups[group]
    num_pages = int(state.pool.classes[record[p.STAGE_CLASS], p.NUM_SLABS] * record[p.PAGES_PER_SLAB])
    if not 0 <= page < num_pages:
        raise RequestError(f"there is no page {page} in group {group}: it has the pages 0 to {num_pages - 1} now")
    rows, columns, pages = _held_cells(state, group)
    mine = pages == page
    found = zip(rows[mine].tolist(), columns[mine].tolist(), strict=True)
    uses = tuple(PageUse(row, *_tokens_of(state, group, row, column)) for row, column in found)
    return bool(state.pool.tags[record[p.FIRST_PAGE] + page, 0] > 0), uses


def _map_class(state: ManagerState, record: np.ndarray) -> ClassMap:
    first, num_slabs = int(record[p.FIRST_SLAB]), int(record[p.NUM_SLABS])
    owners = state.pool.slabs[first : first + num_slabs, p.OWNER].astype(np.int16)
    groups = range(int(record[p.FIRST_GROUP]), int(record[p.END_GROUP]))
    return ClassMap(owners, {group: _map_group(state, group, owners == group) for group in groups})


def _map_group(state: ManagerState, group: int, owned: np.ndarray) -> GroupMap:
    # owned: bool [slabs]
    record = state.pool.groups[group]
    first, shape = int(record[p.FIRST_PAGE]), (len(owned), int(record[p.PAGES_PER_SLAB]))
    mine = slice(first, first + shape[0] * shape[1])
    references = state.pool.pages[mine, p.REFS].reshape(shape)[owned]
    is_tagged = state.pool.tags[mine, 0].reshape(shape)[owned] > 0
    holders = np.full(shape, FREE, dtype=np.int32)
    rows, _, pages = _held_cells(state, group)
    holders.reshape(-1)[pages[::-1]] = rows[::-1]  # of several the last one stays, which is the first
    holders = holders[owned]
    holders[is_tagged & (references == 0)] = CACHED
    return GroupMap(holders, np.minimum(references, MOST_HOLDERS).astype(np.uint16))


def _held_cells(state: ManagerState, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # rows, columns and page ids, int [n] each, of all cells of a group's table with a page, row by row
    facts, held = state.groups[group], np.flatnonzero(state.rows[:, s.HELD])
    columns = int(facts[s.COLUMNS])
    table = state.table[facts[s.TABLE] : facts[s.TABLE] + len(state.rows) * columns].reshape(-1, columns)[held]
    at = np.flatnonzero(table)
    index, column = np.divmod(at, columns)
    return held[index], column, table.reshape(-1)[at] - int(state.pool.groups[group, p.FIRST_PAGE])


def _tokens_of(state: ManagerState, group: int, row: int, column: int) -> tuple[int, int]:
    # the first token of a cell's page, and the first one behind it
    facts, computed = state.groups[group], int(state.rows[row, s.COMPUTED])
    block_size, width = int(facts[s.BLOCK_SIZE]), int(facts[s.WIDTH])
    if facts[s.IS_STATE]:
        end = int(state.cuts[row, column - width - 1]) if column > width else computed
        return max(0, end - int(state.consts[s.UNIT])), end
    if not facts[s.GROWS]:
        return 0, 0
    if column == width:  # the block in which the reused prefix ends
        column = computed // block_size
    first = column * block_size
    return first, max(first, min(first + block_size, computed))
