"""A step of many rows: pages before it, results after it, and the end of a row. Compiled.

A decode step changes nothing for most rows: their next token has a place, their window has not left a block, their
unit is not full. Two numbers per row, GROW_AT and RELEASE_AT, say from how many tokens on something must be done, so
that the others cost a comparison.
"""

from __future__ import annotations

import numpy as np

from girih.kv import state as s
from girih.kv.checkpoints import drop_cuts, has_cuts, publish_cuts, publish_end
from girih.kv.compiled import entry, inner
from girih.kv.event_log import is_wanted, note_tokens
from girih.kv.hashing import hash_unit
from girih.kv.holdings import publish_page, release_cell, settle, take_into
from girih.kv.reuse import END, attention_worth, expected_worth, mark_places
from girih.kv.slab_pool import count_hit, fits
from girih.kv.state import ManagerState, cell, end_column, first_column

Int = int | np.integer


@entry
def reserve_rows(state: ManagerState, rows: np.ndarray, num_new_tokens: np.ndarray) -> Int:
    """Make pages for the next tokens of rows, in order, and return how many rows were served.

    Args:
        state: the manager's.
        rows: int64 [n].
        num_new_tokens: int32 [n].
    """
    need, records = state.need, state.rows
    for i in range(rows.shape[0]):
        row = np.int64(rows[i])
        end = records[row, s.COMPUTED] + num_new_tokens[i]
        if end <= records[row, s.GROW_AT]:
            continue
        _count_pages(state, row, end, need)
        if not fits(state.pool, need):
            return i
        for group in range(need.shape[0]):
            for _ in range(need[group]):
                _append_page(state, group, row)
        s.mark_dirty(state, row)
        set_grow_at(state, row)
    return rows.shape[0]


@entry
def largest_chunk(state: ManagerState, row: Int, limit: Int) -> Int:
    """Return the largest n <= limit for which `reserve_rows` would serve this row; 0 if for none.

    Tried are `limit` and what ends with a unit: all chunks that end in one unit cost the same.
    """
    need = state.need
    computed, unit = state.rows[row, s.COMPUTED], state.consts[s.UNIT]
    _count_pages(state, row, computed + limit, need)
    if fits(state.pool, need):
        return limit
    first = computed // unit + 1
    low, high = first - 1, (computed + limit - 1) // unit  # `low` units fit, or are too few to matter
    while low < high:
        middle = (low + high + 1) // 2
        _count_pages(state, row, middle * unit, need)
        if fits(state.pool, need):
            low = middle
        else:
            high = middle - 1
    if low >= first:
        return low * unit - computed
    if limit > 1:  # less than the rest of a unit costs the same, but the lookahead may need another block
        _count_pages(state, row, computed + 1, need)
        if fits(state.pool, need):
            return 1
    return 0


@inner
def _count_pages(state: ManagerState, row: Int, end: Int, need: np.ndarray) -> None:
    for group in range(need.shape[0]):
        need[group] = max(0, end_column(state, group, end) - state.spans[group, row, s.LAST])


@inner
def _append_page(state: ManagerState, group: Int, row: Int) -> None:
    column = state.spans[group, row, s.LAST]
    take_into(state, group, row, column)
    state.spans[group, row, s.LAST] = column + 1
    source = state.table[cell(state, group, row, state.groups[group, s.WIDTH])]
    block_size = state.groups[group, s.BLOCK_SIZE]
    behind_prefix = state.groups[group, s.GROWS] and column == state.rows[row, s.COMPUTED] // block_size
    if source != 0 and behind_prefix:
        copy = state.copies[state.consts[s.NUM_COPIES]]
        copy[0], copy[1], copy[2] = group, row, column
        state.consts[s.NUM_COPIES] += 1


@inner
def set_grow_at(state: ManagerState, row: Int) -> None:
    """Note up to how many tokens all groups of a row have pages."""
    grow_at = np.int64(s.NEVER)
    for group in range(state.groups.shape[0]):
        last = state.spans[group, row, s.LAST]
        if state.groups[group, s.GROWS]:
            grow_at = min(grow_at, last * state.groups[group, s.BLOCK_SIZE] - state.consts[s.LOOKAHEAD])
        elif last < state.groups[group, s.WIDTH]:
            grow_at = np.int64(-1)
    state.rows[row, s.GROW_AT] = grow_at


@inner
def set_release_at(state: ManagerState, row: Int) -> None:
    """Note at how many computed tokens a row next gives something up: at once if it has a source or cuts."""
    computed = state.rows[row, s.COMPUTED]
    release_at = np.int64(s.NEVER)
    for group in range(state.groups.shape[0]):
        if state.table[cell(state, group, row, state.groups[group, s.WIDTH])] != 0:
            release_at = computed
        if state.groups[group, s.FIRST_TOKEN] < 0 or state.groups[group, s.IS_STATE]:
            continue
        first, ahead = state.spans[group, row, s.FIRST], computed + 1
        look_until = min(computed + 2 * state.groups[group, s.BLOCK_SIZE], state.consts[s.LONGEST])
        while ahead < look_until and first_column(state, group, ahead) <= first:
            ahead += 1
        release_at = min(release_at, ahead)
    if state.consts[s.HAS_STATES] and has_cuts(state, row):
        release_at = computed
    state.rows[row, s.RELEASE_AT] = release_at


@entry
def publish_rows(state: ManagerState, rows: np.ndarray, num_tokens: np.ndarray) -> None:
    """List the units of rows that end within their first tokens and whose keys are known.

    Args:
        state: the manager's.
        rows: int64 [n].
        num_tokens: int32 [n]; computed and scheduled tokens.
    """
    for i in range(rows.shape[0]):
        publish_units(state, np.int64(rows[i]), np.int64(num_tokens[i]) // state.consts[s.UNIT])


@inner
def publish_units(state: ManagerState, row: Int, until: Int) -> None:
    """List the units of a row before `until`, in the groups whose blocks end with them."""
    record, unit_tokens = state.rows[row], state.consts[s.UNIT]
    until = min(until, record[s.HASHED])
    for unit in range(record[s.PUBLISHED], until):
        for group in range(state.groups.shape[0]):
            block_size = state.groups[group, s.BLOCK_SIZE]
            if state.groups[group, s.GROWS] and (unit + 1) * unit_tokens % block_size == 0:
                _publish_unit(state, group, row, unit)
    record[s.PUBLISHED] = max(record[s.PUBLISHED], until)


@inner
def _publish_unit(state: ManagerState, group: Int, row: Int, unit: Int) -> None:
    column = unit * state.consts[s.UNIT] // state.groups[group, s.BLOCK_SIZE]
    page = np.int64(state.table[cell(state, group, row, column)])
    if page != 0:
        is_full = (unit + 1) * state.consts[s.UNIT] % state.groups[group, s.BLOCK_SIZE] == 0
        key = state.keys[row, unit]
        publish_page(state, row, unit + 1, key[0], key[1], group, page, is_full)


@inner
def _publish_mid_units(state: ManagerState, row: Int) -> None:
    # a prefix that ends inside a block is copied, so that its units are listed when they are computed
    record, unit_tokens = state.rows[row], state.consts[s.UNIT]
    until = min(record[s.COMPUTED] // unit_tokens, record[s.HASHED])
    for unit in range(record[s.LISTED], until):
        for group in range(state.groups.shape[0]):
            if state.groups[group, s.GROWS] and (unit + 1) * unit_tokens % state.groups[group, s.BLOCK_SIZE] != 0:
                _publish_unit(state, group, row, unit)
    record[s.LISTED] = max(record[s.LISTED], until)


@entry
def update_rows(
    state: ManagerState, rows: np.ndarray, num_tokens: np.ndarray, sampled_rows: np.ndarray, token_ids: np.ndarray
) -> None:
    """Count scheduled tokens as computed, release what left a window, append the sampled tokens.

    Args:
        state: the manager's.
        rows: int64 [n], distinct.
        num_tokens: int32 [n]; computed by this step.
        sampled_rows: int64 [m], distinct, each with all its tokens computed.
        token_ids: int32 [m].
    """
    records, tails = state.rows, state.tails  # read once: no store below can change where they are
    for i in range(rows.shape[0]):
        row = np.int64(rows[i])
        computed = records[row, s.COMPUTED] + num_tokens[i]
        records[row, s.COMPUTED] = computed
        if computed >= records[row, s.RELEASE_AT]:
            _release_left_behind(state, row)
            set_release_at(state, row)
    caching, last_position = state.consts[s.CACHING], state.consts[s.UNIT] - 1  # a unit is a power of two
    listed = s.LISTED if state.consts[s.MID_UNITS] else s.PUBLISHED
    for i in range(sampled_rows.shape[0]):
        row = np.int64(sampled_rows[i])
        known = records[row, s.KNOWN]
        if caching:
            position = known & last_position
            if position == 0 or records[row, listed] < records[row, s.HASHED]:
                _publish_known(state, row)
            tails[row, position] = token_ids[i]
        records[row, s.KNOWN] = known + 1


@inner
def _release_left_behind(state: ManagerState, row: Int) -> None:
    for group in range(state.groups.shape[0]):
        _release_source(state, group, row)
        span = state.spans[group, row]
        if state.groups[group, s.FIRST_TOKEN] < 0 or state.groups[group, s.IS_STATE]:
            continue
        first = first_column(state, group, state.rows[row, s.COMPUTED])
        if first > span[s.FIRST]:
            for column in range(span[s.FIRST], first):
                release_cell(state, group, row, column, attention_worth(state, group, row, column))
            span[s.FIRST] = first
            s.mark_dirty(state, row)
    if state.consts[s.HAS_STATES]:
        publish_cuts(state, row)
    _drop_copies(state, row)


@inner
def _release_source(state: ManagerState, group: Int, row: Int) -> None:
    # a checkpoint that was reused is worth the prefix that it saved, but an end little: the row has one of its own
    worth, column = state.groups[group, s.BLOCK_SIZE], state.groups[group, s.WIDTH]
    if state.groups[group, s.IS_STATE]:
        worth = max(1, state.rows[row, s.CHECKPOINT])
        if worth > 1:
            count_hit(state.pool, np.int64(state.table[cell(state, group, row, column)]))
    release_cell(state, group, row, column, worth)


@inner
def _drop_copies(state: ManagerState, row: Int) -> None:
    kept = 0
    for i in range(state.consts[s.NUM_COPIES]):
        if state.copies[i, 1] != row:
            for column in range(3):
                state.copies[kept, column] = state.copies[i, column]
            kept += 1
    state.consts[s.NUM_COPIES] = kept


@inner
def _publish_known(state: ManagerState, row: Int) -> None:
    # every known token is computed: make the key of a unit that is full now, and list what is not listed yet
    record, unit_tokens = state.rows[row], state.consts[s.UNIT]
    units = record[s.KNOWN] // unit_tokens
    if record[s.KNOWN] % unit_tokens == 0 and units > record[s.HASHED]:
        low, high = state.roots[row, 0], state.roots[row, 1]
        if units > 1:
            low, high = state.keys[row, units - 2, 0], state.keys[row, units - 2, 1]
        low, high = hash_unit(state.secret, low, high, state.tails[row])
        state.keys[row, units - 1, 0] = low
        state.keys[row, units - 1, 1] = high
        record[s.HASHED] = units
        if is_wanted(state.log):
            note_tokens(state.log, row, (units - 1) * unit_tokens, state.tails[row])
    publish_units(state, row, record[s.COMPUTED] // unit_tokens)
    if state.consts[s.MID_UNITS]:
        _publish_mid_units(state, row)


@entry
def free_row(state: ManagerState, row: Int) -> None:
    """End a row: list where it ended, give back its pages, the sequence's tail to be evicted first."""
    if state.consts[s.CACHING]:
        if state.rows[row, s.KNOWN] == state.rows[row, s.COMPUTED]:
            _publish_known(state, row)
        publish_units(state, row, state.rows[row, s.COMPUTED] // state.consts[s.UNIT])
        if state.consts[s.MID_UNITS]:
            _publish_mid_units(state, row)
        publish_end(state, row)
        mark_places(state, row)
    drop_cuts(state, row)
    _drop_copies(state, row)
    computed = state.rows[row, s.COMPUTED]
    for group in range(state.groups.shape[0]):
        _release_source(state, group, row)
        span = state.spans[group, row]
        for column in range(span[s.LAST] - 1, span[s.FIRST] - 1, -1):
            worth = expected_worth(state, row, END, computed - state.rows[row, s.CHECKPOINT])
            if not state.groups[group, s.IS_STATE]:
                worth = attention_worth(state, group, row, column)
            release_cell(state, group, row, column, worth)
        span[:] = 0
    dirty = state.rows[row, s.DIRTY]
    state.rows[row] = 0
    state.rows[row, s.DIRTY] = dirty


@entry
def bring_up_to_date(state: ManagerState) -> None:
    """Take in what the pool evicted and moved by itself."""
    settle(state)
