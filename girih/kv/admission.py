"""What of a prompt can be reused, and how a request takes its row. Compiled.

    unit        0     1     2     3     4 (not full)
    group 0     17    4     9     21    -       pages found, 0: none
    group 1     0     0     3     12    -       a window: units 2 and 3 are enough to go on behind 3
    states      0     0     0     40    -       a state group: the state behind unit 3
                                     ^ the last boundary where every group has what its next token reads

A prefix may also end behind a tail: the last tokens of a request that ended, which fill no unit.
"""

from __future__ import annotations

import numpy as np

from girih.kv import state as s
from girih.kv.compiled import entry, inner
from girih.kv.hashing import hash_tail
from girih.kv.holdings import pin_into
from girih.kv.index import find_entry
from girih.kv.pool_state import REFS
from girih.kv.reuse import note_origin
from girih.kv.slab_pool import fits
from girih.kv.state import ManagerState, first_column, first_read
from girih.kv.stepping import set_grow_at, set_release_at

Int = int | np.integer

# elements of what `look_up` returns
TOKENS, TAIL, UNITS, LOST_TO_STATE, LOST_TO_WINDOW = 0, 1, 2, 3, 4
ALL_GROUPS, WITHOUT_STATES, FULL_GROUPS = 0, 1, 2


@entry
def look_up(state: ManagerState, token_ids: np.ndarray, keys: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Find the longest prefix that every group can serve and that leaves a token to compute.

    Args:
        state: the manager's.
        token_ids: int32 [num_tokens].
        keys: uint64 [num_tokens // unit, 2].
        found: int32 [units that may be reused, num_groups], zeros; filled with page numbers.

    Returns:
        int64 [5]: tokens to reuse; the entry of the tail that they end with, or 0; units that any group knows; tokens
        that could be reused too, but for a missing state, and but for missing pages of a window.
    """
    result = np.zeros(5, dtype=np.int64)
    num_units = _find(state, keys, found)
    if num_units == 0:
        return result
    num_cached = np.zeros((num_units + 1, found.shape[1]), dtype=np.int32)
    for unit in range(num_units):
        for group in range(found.shape[1]):
            num_cached[unit + 1, group] = num_cached[unit, group] + (found[unit, group] != 0)
    best = _last_boundary(state, num_cached, num_units, ALL_GROUPS)
    result[TOKENS] = best * state.consts[s.UNIT]
    result[UNITS] = num_units
    _extend_by_tail(state, token_ids, keys, num_cached, best, result)
    if best < num_units:
        without_states = _last_boundary(state, num_cached, num_units, WITHOUT_STATES) * state.consts[s.UNIT]
        full = _last_boundary(state, num_cached, num_units, FULL_GROUPS) * state.consts[s.UNIT]
        result[LOST_TO_STATE] = max(0, without_states - result[TOKENS])
        result[LOST_TO_WINDOW] = max(0, full - max(without_states, result[TOKENS]))
    return result


@inner
def _find(state: ManagerState, keys: np.ndarray, found: np.ndarray) -> Int:
    # fills `found`, returns the units up to the last one that is known
    groups, unit_tokens = state.groups, state.consts[s.UNIT]
    patience, needs_all = np.int64(1), False
    known: Int = np.int64(0)
    for group in range(groups.shape[0]):
        if groups[group, s.FIRST_TOKEN] < 0:  # it needs all units: nothing behind a missing block can be reused
            patience = max(patience, groups[group, s.BLOCK_SIZE] // unit_tokens)
            needs_all = True
    if not needs_all:
        patience = np.int64(found.shape[0])
    for unit in range(found.shape[0]):
        number = np.int64(find_entry(state.prefix_index, keys[unit, 0], keys[unit, 1]))
        if number == 0:
            if unit - known >= patience:
                break
            continue
        known = unit + 1
        for group in range(groups.shape[0]):
            found[unit, group] = state.prefix_index.pages[number, group]
    if state.consts[s.MID_UNITS]:
        _fill_blocks(state, found, known)
    return known


@inner
def _fill_blocks(state: ManagerState, found: np.ndarray, num_units: Int) -> None:
    # a page that is listed under a later unit of its block holds the earlier ones as well
    for group in range(found.shape[1]):
        per_block = state.groups[group, s.BLOCK_SIZE] // state.consts[s.UNIT]
        if per_block == 1 or state.groups[group, s.IS_STATE]:
            continue
        for unit in range(num_units - 2, -1, -1):
            if found[unit, group] == 0 and (unit + 1) % per_block != 0:
                found[unit, group] = found[unit + 1, group]


@inner
def _last_boundary(state: ManagerState, num_cached: np.ndarray, num_units: Int, which: Int) -> Int:
    # the most units behind which all of these groups can go on
    for boundary in range(num_units, 0, -1):
        right = True
        for group in range(num_cached.shape[1]):
            if which == WITHOUT_STATES and state.groups[group, s.IS_STATE]:
                continue
            if which == FULL_GROUPS and state.groups[group, s.FIRST_TOKEN] >= 0:
                continue
            if not _has_units(state, num_cached, group, boundary * state.consts[s.UNIT], boundary):
                right = False
                break
        if right:
            return boundary
    return 0


@inner
def _has_units(state: ManagerState, num_cached: np.ndarray, group: Int, num_tokens: Int, boundary: Int) -> bool:
    # whether a group has cached what a continuation behind `num_tokens` reads, up to unit `boundary`
    unit_tokens = state.consts[s.UNIT]
    if state.groups[group, s.TRIM] > 0:
        boundary = (num_tokens + state.groups[group, s.TRIM] + unit_tokens - 1) // unit_tokens
        if boundary >= num_cached.shape[0]:
            return False
    first = first_read(state, group, num_tokens) // unit_tokens
    return first >= boundary or num_cached[boundary, group] - num_cached[first, group] == boundary - first


@inner
def _extend_by_tail(
    state: ManagerState, token_ids: np.ndarray, keys: np.ndarray, num_cached: np.ndarray, best: Int, result: np.ndarray
) -> None:
    unit_tokens = state.consts[s.UNIT]
    for units in range(num_cached.shape[0] - 1, max(best, 1) - 1, -1):
        number = np.int64(find_entry(state.prefix_index, keys[units - 1, 0], keys[units - 1, 1]))
        length = np.int64(state.prefix_index.tails[number])
        num_tokens = units * unit_tokens + length
        if length == 0 or not result[TOKENS] < num_tokens < token_ids.shape[0]:
            continue
        full = num_tokens // unit_tokens
        parent, tail_ids = keys[full - 1], token_ids[full * unit_tokens : num_tokens]
        low, high = hash_tail(state.secret, parent[0], parent[1], tail_ids)
        tail = np.int64(find_entry(state.prefix_index, low, high))
        if tail == 0:
            continue
        right = True
        for group in range(state.groups.shape[0]):
            right &= state.prefix_index.pages[tail, group] != 0 and state.groups[group, s.TRIM] == 0
            if not state.groups[group, s.IS_STATE]:
                right &= full == units and _has_units(state, num_cached, group, num_tokens, units)
        if right:
            result[TOKENS], result[TAIL] = num_tokens, tail
            return


@entry
def hit_fits(state: ManagerState, hit: np.ndarray, found: np.ndarray, need: np.ndarray, num_tokens: Int) -> bool:
    """Tell whether a request fits beside the pages referenced now if it reuses this prefix.

    Args:
        state: the manager's.
        hit: as `look_up` returned it.
        found: as `look_up` filled it.
        need: int64 [num_groups]; the pages that it holds at its peak if it shares none.
        num_tokens: its known tokens; a shared page that leaves a window on the way makes no room.
    """
    extra = need.copy()
    for group in range(state.groups.shape[0]):
        kept_from = first_column(state, group, num_tokens - 1)
        for column in range(kept_from, shared_columns(state, group, hit[TOKENS])):
            page = shared_page(state, found, group, column)
            extra[group] -= state.pool.pages[page, REFS] > 0 and extra[group] > 0
        page = source_page(state, hit, found, group)
        extra[group] += page != 0 and state.pool.pages[page, REFS] == 0
    return fits(state.pool, extra)


@inner
def shared_columns(state: ManagerState, group: Int, num_tokens: Int) -> Int:
    """Return how many columns of a reused prefix a row can share: whole blocks."""
    return num_tokens // state.groups[group, s.BLOCK_SIZE] if state.groups[group, s.GROWS] else 0


@inner
def shared_page(state: ManagerState, found: np.ndarray, group: Int, column: Int) -> Int:
    """Return the page of a whole block: the one listed under its last unit."""
    last_unit = (column + 1) * state.groups[group, s.BLOCK_SIZE] // state.consts[s.UNIT] - 1
    return np.int64(found[last_unit, group])


@inner
def source_page(state: ManagerState, hit: np.ndarray, found: np.ndarray, group: Int) -> Int:
    """Return the page that a row starts from without writing it, 0 if there is none; see `state.py`."""
    num_tokens = hit[TOKENS]
    if num_tokens == 0:
        return 0
    if not state.groups[group, s.IS_STATE] and num_tokens % state.groups[group, s.BLOCK_SIZE] == 0:
        return 0
    if hit[TAIL] != 0:
        return np.int64(state.prefix_index.pages[hit[TAIL], group])
    return np.int64(found[num_tokens // state.consts[s.UNIT] - 1, group])


@entry
def admit_row(
    state: ManagerState, row: Int, token_ids: np.ndarray, keys: np.ndarray, hit: np.ndarray, found: np.ndarray,
    num_prompt_tokens: Int, root: np.ndarray,
) -> None:  # fmt: skip
    """Start a row behind a reused prefix, whose pages it pins.

    Args:
        state: the manager's.
        row: a free row.
        token_ids: int32 [num_tokens]; all known tokens.
        keys: uint64 [num_tokens // unit, 2]; none without caching.
        hit: as `look_up` returned it.
        found: as `look_up` filled it.
        num_prompt_tokens: how many of the tokens are the prompt.
        root: uint64 [2]; the key before the first unit.
    """
    num_tokens, unit_tokens, record = hit[TOKENS], state.consts[s.UNIT], state.rows[row]
    record[s.HELD] = 1
    for group in range(state.groups.shape[0]):
        span = state.spans[group, row]
        span[:] = 0
        if state.groups[group, s.GROWS]:
            span[:] = first_column(state, group, num_tokens)
            span[s.LAST] = shared_columns(state, group, num_tokens)
            for column in range(span[s.FIRST], span[s.LAST]):
                pin_into(state, group, row, column, shared_page(state, found, group, column))
        page = source_page(state, hit, found, group)
        if page != 0:
            pin_into(state, group, row, state.groups[group, s.WIDTH], page)
    record[s.COMPUTED] = record[s.CHECKPOINT] = num_tokens
    record[s.KNOWN], record[s.PROMPT] = token_ids.shape[0], num_prompt_tokens
    record[s.HASHED], record[s.BRANCH] = keys.shape[0], hit[UNITS]
    record[s.PUBLISHED] = record[s.LISTED] = num_tokens // unit_tokens
    state.keys[row, : keys.shape[0]] = keys
    state.roots[row] = root
    tail = token_ids.shape[0] % unit_tokens
    state.tails[row, :tail] = token_ids[token_ids.shape[0] - tail :]
    if num_tokens > 0:
        s.mark_dirty(state, row)
        state.stats[s.HIT] += num_tokens
    note_origin(state, row)
    set_grow_at(state, row)
    set_release_at(state, row)
