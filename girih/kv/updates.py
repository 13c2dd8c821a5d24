"""From the manager's arrays to the message that tells the workers what happens to the cache before a step."""

from __future__ import annotations

import numpy as np

from girih.kv import state as s
from girih.kv.compiled import Record, entry
from girih.kv.pool_state import FIRST_PAGE, MOVED_BYTES, MOVES
from girih.kv.state import MAX_CUTS, ManagerState, cell
from girih.messages import CacheUpdate, PageCopies, StateStep, TableUpdate

Int = int | np.integer

NOTHING = np.zeros(0, dtype=np.int32)
NO_CHANGE = TableUpdate(NOTHING, NOTHING, NOTHING)


class UpdateMaker:
    """Says what the workers do not know yet, each time it is asked.

    Args:
        state: the manager's.
        record: the same for compiled functions.
        null_ids: int64 [num_groups]; the null page's id in each group.
    """

    def __init__(self, state: ManagerState, record: Record, null_ids: np.ndarray):
        self._state, self._record, self._null_ids = state, record, null_ids
        self._state_groups = np.flatnonzero(state.groups[:, s.IS_STATE]).tolist()
        self._no_changes = (NO_CHANGE,) * len(null_ids)
        self._no_update = CacheUpdate((), (), self._no_changes, {})
        self._ends = np.zeros(len(null_ids), dtype=np.int64)
        self._count_changes = count_changes.bound(record, self._ends)
        self._fill_changes = fill_changes.bound(record, null_ids, self._ends, NOTHING.reshape(3, 0))

    def take(self, rows: np.ndarray) -> CacheUpdate:
        """Return what is new; it counts as known from here on.

        Args:
            rows: int64 [n]; the rows of the step.
        """
        state = self._state
        tables = self._take_tables() if state.consts.item(s.NUM_DIRTY) else self._no_changes
        copies = _copies(state) if state.consts.item(s.NUM_COPIES) else ()
        moves = _take_moves(state) if state.pool.counts.item(MOVES) else ()
        if tables is self._no_changes and not (copies or moves or self._state_groups):
            return self._no_update
        states = {group: self._state_step(group, rows) for group in self._state_groups}
        return CacheUpdate(moves, copies, tables, states)

    def _take_tables(self) -> tuple[TableUpdate, ...]:
        changes = np.empty((3, self._count_changes(self._record, self._ends)), dtype=np.int32)
        self._fill_changes(self._record, self._null_ids, self._ends, changes)
        tables, start = [], 0
        for end in self._ends.tolist():
            tables.append(TableUpdate(*changes[:, start:end]) if end > start else NO_CHANGE)
            start = end
        return tuple(tables)

    def _state_step(self, group: int, rows: np.ndarray) -> StateStep:
        own = np.empty((2, len(rows)), dtype=np.int32)
        cuts = np.empty((3, len(rows) * MAX_CUTS), dtype=np.int32)
        count = fill_states(self._record, group, int(self._null_ids[group]), rows, own, cuts)
        return StateStep(own[0], own[1], *cuts[:, :count])


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
    # the sources stay pinned until the step's tokens count as computed
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


@entry
def count_changes(state: ManagerState, starts: np.ndarray) -> Int:
    """Count the table entries that the workers do not know; write the number of those before each group's."""
    total = np.int64(0)
    for group in range(starts.shape[0]):
        starts[group] = total
        if state.groups[group, s.IS_STATE]:
            continue
        for i in range(state.consts[s.NUM_DIRTY]):
            span = state.spans[group, state.dirty[i]]
            total += max(0, min(span[s.FIRST], span[s.SENT_LAST]) - span[s.SENT_FIRST])
            total += span[s.LAST] - max(span[s.SENT_LAST], span[s.FIRST])
    return total


@entry
def fill_changes(state: ManagerState, null_ids: np.ndarray, starts: np.ndarray, changes: np.ndarray) -> None:
    """Write rows, columns and page ids, int32 [3, n], of each group from its start on, and mark them as known.

    Each start becomes the group's end.
    """
    for group in range(starts.shape[0]):
        if state.groups[group, s.IS_STATE]:
            continue
        at, first_page, null_id = starts[group], state.pool.groups[group, FIRST_PAGE], null_ids[group]
        for i in range(state.consts[s.NUM_DIRTY]):
            row = np.int64(state.dirty[i])
            span = state.spans[group, row]
            for column in range(span[s.SENT_FIRST], min(span[s.FIRST], span[s.SENT_LAST])):
                changes[0, at], changes[1, at], changes[2, at] = row, column, null_id
                at += 1
            start = cell(state, group, row, 0)
            for column in range(max(span[s.SENT_LAST], span[s.FIRST]), span[s.LAST]):
                changes[0, at], changes[1, at], changes[2, at] = row, column, state.table[start + column] - first_page
                at += 1
            span[s.SENT_FIRST], span[s.SENT_LAST] = span[s.FIRST], span[s.LAST]
        starts[group] = at
    for i in range(state.consts[s.NUM_DIRTY]):
        state.rows[state.dirty[i], s.DIRTY] = 0
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
