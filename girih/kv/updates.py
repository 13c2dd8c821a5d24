"""From the manager's arrays to the message that tells the workers what happens to the cache before a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from girih.kv import state as s
from girih.kv.compiled import Record, entry
from girih.kv.pool_state import FIRST_PAGE, MOVED_BYTES, MOVES
from girih.kv.state import MAX_CUTS, ManagerState, cell
from girih.messages import CacheUpdate, PageCopies, StateStep, TableUpdate

NOTHING = np.zeros(0, dtype=np.int32)
NO_CHANGE = TableUpdate(NOTHING, NOTHING, NOTHING)


def take_cache_update(state: ManagerState, record: Record, null_ids: np.ndarray, rows: np.ndarray) -> CacheUpdate:
    """Return what the workers do not know yet; it counts as known from here on.

    Args:
        state: the manager's.
        record: the same for compiled functions.
        null_ids: int64 [num_groups]; the null page's id in each group.
        rows: int [n]; the rows of the step.
    """
    num_groups = len(null_ids)
    tables: Sequence[TableUpdate] = (NO_CHANGE,) * num_groups
    if state.consts[s.NUM_DIRTY]:
        tables = _take_tables(record, null_ids)
    copies = _copies(state) if state.consts[s.NUM_COPIES] else ()
    moves = _take_moves(state) if state.pool.counts[MOVES] else ()
    states = {}
    if state.consts[s.HAS_STATES]:
        which = np.flatnonzero(state.groups[:, s.IS_STATE]).tolist()
        states = {group: _state_step(record, group, int(null_ids[group]), rows) for group in which}
    return CacheUpdate(moves, copies, tuple(tables), states)


def _take_tables(record: Record, null_ids: np.ndarray) -> list[TableUpdate]:
    counts = count_changes(record)
    changes = np.empty((3, int(counts.sum())), dtype=np.int32)
    starts = np.cumsum(counts) - counts
    fill_changes(record, null_ids, starts.copy(), changes)
    ends = (starts + counts).tolist()
    return [
        TableUpdate(*changes[:, start:end]) if end > start else NO_CHANGE
        for start, end in zip(starts.tolist(), ends, strict=True)
    ]


def _take_moves(state: ManagerState) -> tuple[PageCopies, ...]:
    """Cut the moves, in order, into runs of one group without a page that is both source and destination."""
    count = int(state.pool.counts[MOVES])
    moves = state.pool.moves[:count]
    runs, start = [], 0
    touched: set[int] = set()
    for i, (group, source, destination) in enumerate(moves.tolist()):
        if i > start and (group != moves[start, 0] or source in touched or destination in touched):
            runs.append(_page_copies(state, moves[start:i]))
            start, touched = i, set()
        touched |= {source, destination}
    runs.append(_page_copies(state, moves[start:]))
    state.pool.counts[MOVES] = state.pool.counts[MOVED_BYTES] = state.consts[s.NUM_FIXED] = 0
    return tuple(runs)


def _page_copies(state: ManagerState, moves: np.ndarray) -> PageCopies:
    group = int(moves[0, 0])
    ids = (moves[:, 1:] - state.pool.groups[group, FIRST_PAGE]).astype(np.int32)
    return PageCopies(group, ids[:, 0], ids[:, 1])


def _copies(state: ManagerState) -> tuple[PageCopies, ...]:
    # the sources stay pinned until the step's result is back
    entries = state.copies[: int(state.consts[s.NUM_COPIES])].astype(np.int64)
    found = []
    for group in np.unique(entries[:, 0]).tolist():
        mine = entries[entries[:, 0] == group]
        starts = state.groups[group, s.TABLE] + mine[:, 1] * state.groups[group, s.COLUMNS]
        first = state.pool.groups[group, FIRST_PAGE]
        sources = state.table[starts + state.groups[group, s.WIDTH]] - first
        destinations = state.table[starts + mine[:, 2]] - first
        found.append(PageCopies(group, sources.astype(np.int32), destinations.astype(np.int32)))
    return tuple(found)


def _state_step(record: Record, group: int, null_id: int, rows: np.ndarray) -> StateStep:
    own = np.empty((2, len(rows)), dtype=np.int32)
    cuts = np.empty((3, len(rows) * MAX_CUTS), dtype=np.int32)
    count = fill_states(record, group, null_id, rows, own, cuts)
    return StateStep(own[0], own[1], *cuts[:, :count])


@entry
def count_changes(state: ManagerState) -> np.ndarray:
    """Count the table entries, int64 [num_groups], that the workers do not know."""
    counts = np.zeros(state.groups.shape[0], dtype=np.int64)
    for i in range(state.consts[s.NUM_DIRTY]):
        for group in range(counts.shape[0]):
            span = state.spans[group, state.dirty[i]]
            if state.groups[group, s.IS_STATE] == 0:
                counts[group] += max(0, min(span[s.FIRST], span[s.SENT_LAST]) - span[s.SENT_FIRST])
                counts[group] += span[s.LAST] - max(span[s.SENT_LAST], span[s.FIRST])
    return counts


@entry
def fill_changes(state: ManagerState, null_ids: np.ndarray, starts: np.ndarray, changes: np.ndarray) -> None:
    """Write rows, columns and page ids, int32 [3, n], from `starts` of each group on, and mark them as known."""
    for i in range(state.consts[s.NUM_DIRTY]):
        row = np.int64(state.dirty[i])
        state.rows[row, s.DIRTY] = 0
        for group in range(starts.shape[0]):
            if state.groups[group, s.IS_STATE]:
                continue
            span = state.spans[group, row]
            at = starts[group]
            for column in range(span[s.SENT_FIRST], min(span[s.FIRST], span[s.SENT_LAST])):
                changes[0, at], changes[1, at], changes[2, at] = row, column, null_ids[group]
                at += 1
            for column in range(max(span[s.SENT_LAST], span[s.FIRST]), span[s.LAST]):
                page = np.int64(state.table[cell(state, group, row, column)])
                changes[0, at], changes[1, at] = row, column
                changes[2, at] = page - state.pool.groups[group, FIRST_PAGE]
                at += 1
            starts[group] = at
            span[s.SENT_FIRST], span[s.SENT_LAST] = span[s.FIRST], span[s.LAST]
    state.consts[s.NUM_DIRTY] = 0


@entry
def fill_states(
    state: ManagerState, group: int, null_id: int, rows: np.ndarray, own: np.ndarray, cuts: np.ndarray
) -> int:
    """Write where rows start from and leave their states, int32 [2, n], and the cuts, int32 [3, m]; return m."""
    first, width, count = state.pool.groups[group, FIRST_PAGE], state.groups[group, s.WIDTH], 0
    for i in range(rows.shape[0]):
        row = np.int64(rows[i])
        start = cell(state, group, row, 0)
        computed, source = state.rows[row, s.COMPUTED], state.table[start + width]
        own[1, i] = state.table[start] - first
        if source != 0:
            own[0, i] = source - first
        else:
            own[0, i] = own[1, i] if computed > 0 else null_id
        for j in range(MAX_CUTS):
            if state.cuts[row, j] != 0:
                cuts[0, count], cuts[1, count] = i, state.cuts[row, j] - computed
                cuts[2, count] = state.table[start + width + 1 + j] - first
                count += 1
    return count
