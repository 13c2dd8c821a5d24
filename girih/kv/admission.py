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
from girih.kv.event_log import is_wanted, note_tokens
from girih.kv.hashing import hash_chain, hash_tail
from girih.kv.holdings import pin_into
from girih.kv.index import find_entry
from girih.kv.pool_state import REFS
from girih.kv.reuse import note_origin
from girih.kv.slab_pool import fits
from girih.kv.state import TAIL, TOKENS, UNITS, ManagerState, first_column, first_read
from girih.kv.stepping import set_grow_at, set_release_at

Int = int | np.integer

NO_ROOM, NO_ROW = -1, -1
ALL_GROUPS, WITHOUT_STATES, FULL_GROUPS = 0, 1, 2


@entry
def look_up(state: ManagerState, token_ids: np.ndarray, root: np.ndarray) -> Int:
    """Return the tokens of the longest prefix that every group can serve and that leaves a token to compute.

    Args:
        state: the manager's.
        token_ids: int32 [num_tokens].
        root: uint64 [2]; the key before the first unit.
    """
    _ask(state, token_ids, root, True)
    return state.prompt.hits[0, TOKENS]


@entry
def admit_row(
    state: ManagerState, row: Int, token_ids: np.ndarray, num_prompt_tokens: Int, root: np.ndarray, read_cache: bool,
    peak_pages: np.ndarray, spoken_for: np.ndarray,
) -> Int:  # fmt: skip
    """Start a row behind the longest cached prefix with which it fits beside the pages referenced now; pin its pages.

    Args:
        state: the manager's.
        row: a free row, or NO_ROW to ask only.
        token_ids: int32 [num_tokens]; all known tokens.
        num_prompt_tokens: how many of the tokens are the prompt.
        root: uint64 [2]; the key before the first unit.
        read_cache: whether a prefix may be reused.
        peak_pages: int64 [num_groups]; the pages that it holds at its peak if it shares none.
        spoken_for: int64 [num_groups]; pages that others will take.

    Returns:
        The reused tokens, or NO_ROOM.
    """
    if token_ids.shape[0] > state.consts[s.LONGEST]:  # a row has no place for more
        return NO_ROOM
    _ask(state, token_ids, root, read_cache)
    choice = 0 if state.prompt.hits[0, TOKENS] > 0 else 1
    while choice < 2 and not _fits(state, choice, token_ids.shape[0], peak_pages, spoken_for):
        choice += 1
    if choice == 2:
        return NO_ROOM
    if row != NO_ROW:
        if state.consts[s.CACHING] and read_cache:
            state.stats[s.LOOKED_UP] += token_ids.shape[0]
            state.stats[s.LOST_TO_STATE] += state.prompt.hits[0, s.MISSING_STATE]
            state.stats[s.LOST_TO_WINDOW] += state.prompt.hits[0, s.MISSING_WINDOW]
        _start_row(state, row, token_ids, num_prompt_tokens, choice)
    return state.prompt.hits[choice, TOKENS]


@inner
def _ask(state: ManagerState, token_ids: np.ndarray, root: np.ndarray, read_cache: bool) -> None:
    # fills `state.prompt`
    prompt = state.prompt
    prompt.hits[0] = 0
    if not state.consts[s.CACHING]:
        return
    length = min(token_ids.shape[0], prompt.token_ids.shape[0])
    if not _is_known_prompt(state, token_ids, length, root):
        prompt.length[0] = length
        prompt.root[0], prompt.root[1] = root[0], root[1]
        for i in range(length):
            prompt.token_ids[i] = token_ids[i]
        hash_chain(state.secret, root, token_ids, state.consts[s.UNIT], prompt.keys[: length // state.consts[s.UNIT]])
    if read_cache:
        _look_up(state, length)


@inner
def _is_known_prompt(state: ManagerState, token_ids: np.ndarray, length: Int, root: np.ndarray) -> bool:
    prompt = state.prompt
    if prompt.length[0] != length or prompt.root[0] != root[0] or prompt.root[1] != root[1]:
        return False
    same = 0
    while same < length and prompt.token_ids[same] == token_ids[same]:
        same += 1
    return same == length


@inner
def _look_up(state: ManagerState, length: Int) -> None:
    prompt, unit = state.prompt, state.consts[s.UNIT]
    hit, num_cached = prompt.hits[0], prompt.num_cached
    num_units = _find(state, max(0, length - 1) // unit)
    if num_units == 0:
        return
    for boundary in range(num_units):
        for group in range(prompt.found.shape[1]):
            num_cached[boundary + 1, group] = num_cached[boundary, group] + (prompt.found[boundary, group] != 0)
    best = _last_boundary(state, num_units, ALL_GROUPS)
    hit[TOKENS], hit[UNITS] = best * unit, num_units
    _extend_by_tail(state, length, num_units, best)
    if best < num_units:
        without_states = _last_boundary(state, num_units, WITHOUT_STATES) * unit
        full = _last_boundary(state, num_units, FULL_GROUPS) * unit
        hit[s.MISSING_STATE] = max(0, without_states - hit[TOKENS])
        hit[s.MISSING_WINDOW] = max(0, full - max(without_states, hit[TOKENS]))


@inner
def _find(state: ManagerState, num_units: Int) -> Int:
    # fills `found`, returns the units up to the last one that is known
    groups, keys, found = state.groups, state.prompt.keys, state.prompt.found
    patience, needs_all = np.int64(1), False
    known: Int = np.int64(0)
    for group in range(groups.shape[0]):
        if groups[group, s.FIRST_TOKEN] < 0:  # it needs all units: nothing behind a missing block can be reused
            patience = max(patience, groups[group, s.BLOCK_SIZE] // state.consts[s.UNIT])
            needs_all = True
    if not needs_all:
        patience = np.int64(num_units)
    for unit in range(num_units):
        number = np.int64(find_entry(state.prefix_index, keys[unit, 0], keys[unit, 1]))
        for group in range(groups.shape[0]):
            found[unit, group] = state.prefix_index.pages[number, group]
        if number != 0:
            known = unit + 1
        elif unit - known >= patience:
            break
    if state.consts[s.MID_UNITS]:
        _fill_blocks(state, known)
    return known


@inner
def _fill_blocks(state: ManagerState, num_units: Int) -> None:
    # a page that is listed under a later unit of its block holds the earlier ones as well
    found = state.prompt.found
    for group in range(found.shape[1]):
        per_block = state.groups[group, s.BLOCK_SIZE] // state.consts[s.UNIT]
        if per_block == 1 or state.groups[group, s.IS_STATE]:
            continue
        for unit in range(num_units - 2, -1, -1):
            if found[unit, group] == 0 and (unit + 1) % per_block != 0:
                found[unit, group] = found[unit + 1, group]


@inner
def _last_boundary(state: ManagerState, num_units: Int, which: Int) -> Int:
    # the most units behind which all of these groups can go on
    for boundary in range(num_units, 0, -1):
        right = True
        for group in range(state.groups.shape[0]):
            if which == WITHOUT_STATES and state.groups[group, s.IS_STATE]:
                continue
            if which == FULL_GROUPS and state.groups[group, s.FIRST_TOKEN] >= 0:
                continue
            if not _has_units(state, group, boundary * state.consts[s.UNIT], boundary, num_units):
                right = False
                break
        if right:
            return boundary
    return 0


@inner
def _has_units(state: ManagerState, group: Int, num_tokens: Int, boundary: Int, num_units: Int) -> bool:
    # whether a group has cached what a continuation behind `num_tokens` reads, up to unit `boundary`
    unit_tokens, num_cached = state.consts[s.UNIT], state.prompt.num_cached
    if state.groups[group, s.TRIM] > 0:
        boundary = (num_tokens + state.groups[group, s.TRIM] + unit_tokens - 1) // unit_tokens
        if boundary > num_units:
            return False
    first = first_read(state, group, num_tokens) // unit_tokens
    return first >= boundary or num_cached[boundary, group] - num_cached[first, group] == boundary - first


@inner
def _extend_by_tail(state: ManagerState, length: Int, num_units: Int, best: Int) -> None:
    prompt, unit_tokens = state.prompt, state.consts[s.UNIT]
    hit, keys = prompt.hits[0], prompt.keys
    for units in range(num_units, max(best, 1) - 1, -1):
        number = np.int64(find_entry(state.prefix_index, keys[units - 1, 0], keys[units - 1, 1]))
        tail_length = np.int64(state.prefix_index.tails[number])
        num_tokens = units * unit_tokens + tail_length
        if tail_length == 0 or not hit[TOKENS] < num_tokens < length:
            continue
        full = num_tokens // unit_tokens
        parent, tail_ids = keys[full - 1], prompt.token_ids[full * unit_tokens : num_tokens]
        low, high = hash_tail(state.secret, parent[0], parent[1], tail_ids)
        tail = np.int64(find_entry(state.prefix_index, low, high))
        if tail == 0:
            continue
        right = True
        for group in range(state.groups.shape[0]):
            right &= state.prefix_index.pages[tail, group] != 0 and state.groups[group, s.TRIM] == 0
            if not state.groups[group, s.IS_STATE]:
                right &= full == units and _has_units(state, group, num_tokens, units, num_units)
        if right:
            hit[TOKENS], hit[TAIL] = num_tokens, tail
            return


@inner
def _fits(state: ManagerState, choice: Int, num_tokens: Int, peak_pages: np.ndarray, spoken_for: np.ndarray) -> bool:
    # with one of the `hits`; a shared page that leaves a window on the way to all known tokens makes no room
    need, hit = state.need, state.prompt.hits[choice]
    for group in range(need.shape[0]):
        extra = peak_pages[group] + spoken_for[group]
        last_token = min(num_tokens - 1, state.consts[s.LONGEST])
        kept_from = first_column(state, group, last_token) if hit[TOKENS] > 0 else 0
        for column in range(kept_from, _shared_columns(state, group, hit[TOKENS])):
            page = _shared_page(state, group, column)
            extra -= state.pool.pages[page, REFS] > 0 and extra > 0
        page = _source_page(state, hit, group)
        need[group] = extra + (page != 0 and state.pool.pages[page, REFS] == 0)
    return fits(state.pool, need)


@inner
def _shared_columns(state: ManagerState, group: Int, num_tokens: Int) -> Int:
    # of a reused prefix a row shares whole blocks
    return num_tokens // state.groups[group, s.BLOCK_SIZE] if state.groups[group, s.GROWS] else 0


@inner
def _shared_page(state: ManagerState, group: Int, column: Int) -> Int:
    # a whole block is listed under its last unit
    last_unit = (column + 1) * state.groups[group, s.BLOCK_SIZE] // state.consts[s.UNIT] - 1
    return np.int64(state.prompt.found[last_unit, group])


@inner
def _source_page(state: ManagerState, hit: np.ndarray, group: Int) -> Int:
    # the page that a row starts from without writing it, 0 if there is none; see `state.py`
    num_tokens = hit[TOKENS]
    if num_tokens == 0:
        return 0
    if not state.groups[group, s.IS_STATE] and num_tokens % state.groups[group, s.BLOCK_SIZE] == 0:
        return 0
    if hit[TAIL] != 0:
        return np.int64(state.prefix_index.pages[hit[TAIL], group])
    return np.int64(state.prompt.found[num_tokens // state.consts[s.UNIT] - 1, group])


@inner
def _start_row(state: ManagerState, row: Int, token_ids: np.ndarray, num_prompt_tokens: Int, choice: Int) -> None:
    prompt, hit, unit_tokens, record = state.prompt, state.prompt.hits[choice], state.consts[s.UNIT], state.rows[row]
    num_tokens, length = hit[TOKENS], token_ids.shape[0]
    record[s.HELD] = 1
    for group in range(state.groups.shape[0]):
        span = state.spans[group, row]
        span[:] = 0
        if state.groups[group, s.GROWS]:
            span[:] = first_column(state, group, num_tokens)
            span[s.LAST] = _shared_columns(state, group, num_tokens)
            for column in range(span[s.FIRST], span[s.LAST]):
                pin_into(state, group, row, column, _shared_page(state, group, column))
        page = _source_page(state, hit, group)
        if page != 0:
            pin_into(state, group, row, state.groups[group, s.WIDTH], page)
    record[s.COMPUTED] = record[s.CHECKPOINT] = num_tokens
    record[s.KNOWN], record[s.PROMPT] = length, num_prompt_tokens
    record[s.BRANCH] = prompt.hits[0, UNITS]  # whatever of it could be reused
    record[s.PUBLISHED] = record[s.LISTED] = num_tokens // unit_tokens
    if state.consts[s.CACHING]:
        units = length // unit_tokens
        record[s.HASHED] = units
        for half in range(2):
            state.roots[row, half] = prompt.root[half]
            for unit in range(units):
                state.keys[row, unit, half] = prompt.keys[unit, half]
        if is_wanted(state.log):
            note_tokens(state.log, row, np.int64(0), token_ids)
    tail = length % unit_tokens
    for i in range(tail):
        state.tails[row, i] = token_ids[length - tail + i]
    if num_tokens > 0:
        s.mark_dirty(state, row)
        state.stats[s.HIT] += num_tokens
    note_origin(state, row)
    set_grow_at(state, row)
    set_release_at(state, row)
