"""Pages in and out of block tables, and what follows when the pool evicts or moves one. Compiled.

After every call that takes a page, `settle` brings tables and index up to date: evicted pages are unlisted, moved
ones are renamed wherever they stand.
"""

from __future__ import annotations

import numpy as np

from girih.kv import state as s
from girih.kv.compiled import inner
from girih.kv.event_log import is_wanted, note_listed, note_unlisted
from girih.kv.eviction import evict
from girih.kv.index import drop_page, entry_at, slot_of
from girih.kv.pool_state import COLUMN, EVICTED, FIRST_PAGE, MOVES, REFS
from girih.kv.slab_pool import pin_page, release_page, take_page
from girih.kv.state import ManagerState, cell, mark_dirty, place

Int = int | np.integer


@inner
def take_into(state: ManagerState, group: Int, row: Int, column: Int) -> None:
    """Give a cell a page of its own; the caller has checked that the pool has one."""
    page = take_page(state.pool, group, column)
    place(state, group, row, column, page)
    settle(state)


@inner
def pin_into(state: ManagerState, group: Int, row: Int, column: Int, page: Int) -> None:
    """Put a page that is listed into a cell too."""
    pin_page(state.pool, group, page)
    place(state, group, row, column, page)


@inner
def release_cell(state: ManagerState, group: Int, row: Int, column: Int, worth: Int) -> None:
    """Empty a cell; a page that no other cell holds stays cached if it is listed, for as long as `worth` says."""
    at = cell(state, group, row, column)
    page = np.int64(state.table[at])
    if page != 0:
        state.table[at] = 0
        release_page(state.pool, group, page, worth)


@inner
def settle(state: ManagerState) -> None:
    """Bring index and tables up to date with what the pool has evicted and moved."""
    if state.pool.counts[EVICTED] > 0:
        _unlist_evicted(state)
    while state.consts[s.NUM_FIXED] < state.pool.counts[MOVES]:
        move = state.pool.moves[state.consts[s.NUM_FIXED]]
        _rename(state, np.int64(move[0]), np.int64(move[1]), np.int64(move[2]))
        state.consts[s.NUM_FIXED] += 1
        state.stats[s.PAGES_MOVED] += 1


@inner
def _unlist_evicted(state: ManagerState) -> None:
    evicted, count = state.pool.evicted, state.pool.counts[EVICTED]
    for i in range(count):
        page = np.int64(evicted[i, 0])
        group = group_of(state, page)
        for j in range(1, evicted.shape[1]):
            if evicted[i, j] != 0:
                if is_wanted(state.log):
                    note_unlisted(state.log, state.prefix_index, group, np.int64(evicted[i, j]))
                drop_page(state.prefix_index, np.int64(evicted[i, j]), group)
    state.stats[s.PAGES_EVICTED] += count
    state.pool.counts[EVICTED] = 0


@inner
def group_of(state: ManagerState, page: Int) -> Int:
    """Return the group of a page number."""
    group = state.groups.shape[0] - 1
    while page < first_page(state, group):
        group -= 1
    return group


@inner
def _rename(state: ManagerState, group: Int, source: Int, destination: Int) -> None:
    tags = state.pool.tags
    for j in range(tags.shape[1]):
        entry = np.int64(tags[destination, j])
        if entry != 0:
            state.prefix_index.pages[entry, group] = destination
    left = np.int64(state.pool.pages[destination, REFS])
    row = np.int64(state.holders[source])
    state.holders[destination] = row
    left -= _rename_in_row(state, group, row, source, destination)
    row = np.int64(0)
    while left > 0 and row < state.rows.shape[0]:
        if state.rows[row, s.HELD]:
            left -= _rename_in_row(state, group, row, source, destination)
        row += 1


@inner
def _rename_in_row(state: ManagerState, group: Int, row: Int, source: Int, destination: Int) -> Int:
    # a page stands in its own column, or as a row's source, or, a state, anywhere in the row
    found = 0
    width = state.groups[group, s.WIDTH]
    start = cell(state, group, row, 0)
    if state.groups[group, s.IS_STATE]:
        for column in range(state.groups[group, s.COLUMNS]):
            if state.table[start + column] == source:
                state.table[start + column] = destination
                found += 1
        return found
    own = np.int64(state.pool.pages[destination, COLUMN])
    if state.table[start + width] == source:
        state.table[start + width] = destination
        found += 1
    if own < width and state.table[start + own] == source:
        state.table[start + own] = destination
        found += 1
        span = state.spans[group, row]
        span[s.SENT_LAST] = min(span[s.SENT_LAST], max(own, span[s.SENT_FIRST]))
        mark_dirty(state, row)
    return found


@inner
def publish_page(
    state: ManagerState, row: Int, units: Int, low: np.uint64, high: np.uint64, group: Int, page: Int, is_full: bool
) -> None:  # fmt: skip
    """List a referenced page under a key: that of the first `units` units of a row, or, with 0, that of a tail.

    If another page of its group is listed there, this one takes its place when nobody references that one, and stays
    private otherwise: also where that one is listed under other keys too, unless this one is a full block and with it
    all that the other one can be.
    """
    index = state.prefix_index
    slot = slot_of(index, low, high)
    known = np.int64(index.pages[index.slots[slot], group])
    if known == page or (known != 0 and state.pool.pages[known, REFS] > 0):
        return
    if known != 0:
        if is_full:
            _take_over_tags(state, group, known, page)
        elif state.pool.tags.shape[1] > 1 and state.pool.tags[known, 1] != 0:
            return
        evict(state.pool, group, known)
        settle(state)
        slot = slot_of(index, low, high)  # the entry may have gone with its last page
    entry = np.int64(entry_at(index, slot, low, high))
    if index.pages[entry, group] != page:
        _tag(state, group, page, entry)
        if is_wanted(state.log):
            root = state.roots[row]
            parent = state.keys[row, units - 2] if units > 1 else root
            note_listed(state.log, index, group, entry, row, units, parent, root)


@inner
def _tag(state: ManagerState, group: Int, page: Int, entry: Int) -> None:
    tags = state.pool.tags
    j = 0
    while tags[page, j] != 0:
        j += 1
    tags[page, j] = entry
    state.prefix_index.pages[entry, group] = page


@inner
def _take_over_tags(state: ManagerState, group: Int, source: Int, page: Int) -> None:
    tags = state.pool.tags
    for j in range(tags.shape[1]):
        if tags[source, j] != 0:
            _tag(state, group, page, np.int64(tags[source, j]))
            tags[source, j] = 0


@inner
def first_page(state: ManagerState, group: Int) -> Int:
    """Return the number of a group's page 0."""
    return state.pool.groups[group, FIRST_PAGE]
