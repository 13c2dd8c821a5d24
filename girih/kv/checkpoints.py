"""Checkpoints of recurrent states, and where a request ended. Compiled.

Three kinds of places get a checkpoint inside a prompt, each behind a full unit: its last unit, for a repeated prompt;
where it branched off from what the cache knew, as others will; and every so many tokens. The step that computes past
such a place writes the state behind exactly that token to a page of its own, a cut. It is listed when the step counts
as computed. It takes only pages that are free or cached for less: nobody waits for a checkpoint. What one is worth
depends on how likely somebody goes on there, see `reuse.py`.

When a request ends, its own pages become the checkpoint: its state behind its last computed token, and the blocks
that are not full, under a key of the last full unit and the exact tail. The next turn of a chat goes on there.
"""

from __future__ import annotations

import numpy as np

from girih.kv import state as s
from girih.kv.compiled import entry, inner
from girih.kv.hashing import hash_tail
from girih.kv.holdings import place, publish_page, release_cell, settle
from girih.kv.index import find_entry
from girih.kv.pool_state import MARK
from girih.kv.reuse import PROMPT_END, expected_worth
from girih.kv.slab_pool import count_hit, take_spare_page
from girih.kv.state import MAX_CUTS, ManagerState, cell

Int = int | np.integer


@entry
def plan_cuts(state: ManagerState, rows: np.ndarray, num_tokens: np.ndarray) -> None:
    """Give the rows of a step pages for the checkpoints that it passes.

    Args:
        state: the manager's; with groups that hold states.
        rows: int [n].
        num_tokens: int [n]; computed and scheduled tokens.
    """
    unit, distance = state.consts[s.UNIT], state.consts[s.CHECKPOINT_TOKENS]
    for i in range(rows.shape[0]):
        row, end = np.int64(rows[i]), np.int64(num_tokens[i])
        record = state.rows[row]
        start = record[s.COMPUTED]
        for position in (record[s.BRANCH] * unit, (record[s.PROMPT] - 1) // unit * unit):
            if start < position <= end:
                _add_cut(state, row, position)
        for number in range(end // distance, start // distance, -1):
            _add_cut(state, row, number * distance)
        if has_cuts(state, row):
            record[s.RELEASE_AT] = start


@inner
def has_cuts(state: ManagerState, row: Int) -> bool:
    """Tell whether a row leaves checkpoints in the step that is under way."""
    found = False
    for j in range(MAX_CUTS):
        found |= state.cuts[row, j] != 0
    return found


@inner
def _add_cut(state: ManagerState, row: Int, position: Int) -> None:
    unit = position // state.consts[s.UNIT]
    free = -1
    for j in range(MAX_CUTS):
        if state.cuts[row, j] == position:
            return
        if state.cuts[row, j] == 0:
            free = j
    if free < 0 or unit == 0 or unit > state.rows[row, s.HASHED] or _is_listed(state, row, unit):
        return
    for group in range(state.groups.shape[0]):
        if state.groups[group, s.IS_STATE]:
            column = state.groups[group, s.WIDTH] + 1 + free
            page = take_spare_page(state.pool, group, column, _cut_worth(state, row, position))
            settle(state)
            if page == 0:
                _release_cut(state, row, free)
                state.stats[s.CHECKPOINTS_DENIED] += 1
                return
            place(state, group, row, column, page)
    state.cuts[row, free] = position


@inner
def _is_prompt_end(state: ManagerState, row: Int, position: Int) -> bool:
    # and nothing else
    unit = state.consts[s.UNIT]
    is_end = position == (state.rows[row, s.PROMPT] - 1) // unit * unit
    return is_end and position != state.rows[row, s.BRANCH] * unit and position % state.consts[s.CHECKPOINT_TOKENS] != 0


@inner
def _cut_worth(state: ManagerState, row: Int, position: Int) -> Int:
    # what is behind a place that somebody is expected to go on from; a later place does not count on a prompt's end
    worth = position - state.rows[row, s.CHECKPOINT]
    if _is_prompt_end(state, row, position):
        return expected_worth(state, row, PROMPT_END, worth)
    return max(1, worth)


@inner
def _is_listed(state: ManagerState, row: Int, unit: Int) -> bool:
    number = np.int64(find_entry(state.prefix_index, state.keys[row, unit - 1, 0], state.keys[row, unit - 1, 1]))
    for group in range(state.groups.shape[0]):
        if state.groups[group, s.IS_STATE] and (number == 0 or state.prefix_index.pages[number, group] == 0):
            return False
    return True


@inner
def _release_cut(state: ManagerState, row: Int, j: Int) -> None:
    worth = _cut_worth(state, row, state.cuts[row, j])
    for group in range(state.groups.shape[0]):
        if state.groups[group, s.IS_STATE]:
            release_cell(state, group, row, state.groups[group, s.WIDTH] + 1 + j, worth)
    state.cuts[row, j] = 0


@inner
def publish_cuts(state: ManagerState, row: Int) -> None:
    """List the checkpoints that a row's computed tokens have passed, and give up the others."""
    last = np.int64(0)
    for j in range(MAX_CUTS):
        position = state.cuts[row, j]
        if position == 0:
            continue
        if position <= state.rows[row, s.COMPUTED]:
            units = position // state.consts[s.UNIT]
            key = state.keys[row, units - 1]
            _publish_states(state, row, np.int64(j), units, key[0], key[1])
            state.stats[s.CHECKPOINTS] += 1
            if not _is_prompt_end(state, row, position):
                last = max(last, position)
        _release_cut(state, row, j)
    state.rows[row, s.CHECKPOINT] = max(state.rows[row, s.CHECKPOINT], last)


@inner
def drop_cuts(state: ManagerState, row: Int) -> None:
    """Give up the checkpoints of a step that did not come back."""
    for j in range(MAX_CUTS):
        if state.cuts[row, j] != 0:
            _release_cut(state, row, j)


@inner
def _publish_states(state: ManagerState, row: Int, cut: Int, units: Int, low: np.uint64, high: np.uint64) -> None:
    # the states in the cells of a cut, or a row's own if it is -1, under the key of so many units, or of a tail if 0
    for group in range(state.groups.shape[0]):
        if state.groups[group, s.IS_STATE]:
            column = state.groups[group, s.WIDTH] + 1 + cut if cut >= 0 else np.int64(0)
            page = np.int64(state.table[cell(state, group, row, column)])
            if cut >= 0:
                _note_place(state, row, page, state.cuts[row, cut])
            publish_page(state, row, units, low, high, group, page, True)


@inner
def _note_place(state: ManagerState, row: Int, page: Int, position: Int) -> None:
    if _is_prompt_end(state, row, position):
        state.pool.pages[page, MARK] = PROMPT_END
    elif position == state.rows[row, s.BRANCH] * state.consts[s.UNIT]:
        count_hit(state.pool, page)


@inner
def publish_end(state: ManagerState, row: Int) -> None:
    """List a row's own state and the blocks that it has not filled, as behind its last computed token."""
    record, unit_tokens = state.rows[row], state.consts[s.UNIT]
    computed = record[s.COMPUTED]
    units, length = computed // unit_tokens, computed % unit_tokens
    if units == 0 or units > record[s.HASHED] or computed > record[s.KNOWN] or _has_not_run(state, row):
        return  # behind a token that nobody knows yet, nobody can go on
    low, high = state.keys[row, units - 1, 0], state.keys[row, units - 1, 1]
    if length > 0:
        listed = _last_listed_unit(state, row, units)
        if units < record[s.HASHED] or listed == 0:
            return  # it ended inside its prompt, where nobody is likely to go on
        key = state.keys[row, listed - 1]
        parent = np.int64(find_entry(state.prefix_index, key[0], key[1]))
        state.prefix_index.tails[parent] = computed - listed * unit_tokens
        low, high = hash_tail(state.secret, low, high, state.tails[row, :length])
        for group in range(state.groups.shape[0]):
            if state.groups[group, s.GROWS]:
                column = computed // state.groups[group, s.BLOCK_SIZE]
                page = np.int64(state.table[cell(state, group, row, column)])
                if page != 0:
                    publish_page(state, row, np.int64(0), low, high, group, page, False)
        units = np.int64(0)
    _publish_states(state, row, np.int64(-1), units, low, high)


@inner
def _last_listed_unit(state: ManagerState, row: Int, units: Int) -> Int:
    # from which a lookup learns where the row ended; an earlier one than its last if only checkpoints are listed
    for unit in range(units, 0, -1):
        if find_entry(state.prefix_index, state.keys[row, unit - 1, 0], state.keys[row, unit - 1, 1]) != 0:
            return np.int64(unit)
        for group in range(state.groups.shape[0]):
            if state.groups[group, s.GROWS]:
                return np.int64(0)
    return np.int64(0)


@inner
def _has_not_run(state: ManagerState, row: Int) -> bool:
    # a row that still holds its source has not computed a token: its own pages hold nothing yet
    for group in range(state.groups.shape[0]):
        at = cell(state, group, row, state.groups[group, s.WIDTH])
        if state.table[at] != 0 or (state.groups[group, s.IS_STATE] and state.spans[group, row, s.LAST] == 0):
            return True
    return False
