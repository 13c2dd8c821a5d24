"""Where requests go on from, and so what a page is worth when its request lets go of it. Compiled.

A request leaves three kinds of places behind which another one may go on:

    branch      where it left what the cache knew when it came: two prompts share what is before it, others will. What
                is before it counts as asked for, also where it had to be computed again.
    end         where it ended: the next turn of a chat goes on there, once. Then that turn's own end is the next
                place, and the old one is of no more use; so its pages do not count as asked for.
    prompt end  a repeated prompt goes on there, and the next turn of a chat that drops what the model thought.

Whether ends or prompt ends are gone on from differs from chat to chat, so a request expects what happened to the one it
goes on from. Of those that begin something new, as many are expected to be gone on from as lately were. The last
page before each place is marked for that. Pages that are worth something in a window, or a state, are worth that much
only times this expectation; a block of full attention is its own tokens.
"""

from __future__ import annotations

import numpy as np

from girih.kv import state as s
from girih.kv.compiled import inner
from girih.kv.index import find_entry
from girih.kv.pool_state import HITS, MARK
from girih.kv.slab_pool import count_hit
from girih.kv.state import ManagerState, cell

Int = int | np.integer

# values of MARK and ORIGIN
NEW, END, PROMPT_END = 0, 1, 2

RECENT_REQUESTS = 1024
"""After so many, those counted so far count half."""


@inner
def note_origin(state: ManagerState, row: Int) -> None:
    """Find out where a row that has just been started goes on from; a place serves for that once."""
    record, unit = state.rows[row], state.consts[s.UNIT]
    branch, origin = record[s.BRANCH], np.int64(NEW)
    if branch > 0:
        key = state.keys[row, branch - 1]
        number = np.int64(find_entry(state.prefix_index, key[0], key[1]))
        for group in range(state.groups.shape[0]):
            page = np.int64(state.prefix_index.pages[number, group])
            if page != 0:
                origin = max(origin, np.int64(state.pool.pages[page, MARK]))
                state.pool.pages[page, MARK] = NEW
    if record[s.COMPUTED] % unit != 0:  # behind a tail, which only an end has
        origin = np.int64(END)
    if origin == END and record[s.COMPUTED] >= branch * unit:
        record[s.BRANCH] = record[s.CHECKPOINT] = 0
    record[s.ORIGIN] = origin
    if record[s.KNOWN] == record[s.PROMPT]:  # else it was preempted, and is its own successor
        _count_request(state, origin)


@inner
def _count_request(state: ManagerState, origin: Int) -> None:
    counts = state.consts[s.REQUESTS :]
    counts[0] += 1
    if origin != NEW:
        counts[origin] += 1
    if counts[0] > RECENT_REQUESTS:
        for i in range(3):
            counts[i] = (counts[i] + 1) // 2


@inner
def mark_places(state: ManagerState, row: Int) -> None:
    """Mark the last page before a row's prompt's end, if that is behind its branch, and before its end.

    An end with a tail needs no mark: whoever finds the tail goes on there, and others do not.
    """
    record, unit = state.rows[row], state.consts[s.UNIT]
    end, prompt_end = record[s.COMPUTED] // unit, (record[s.PROMPT] - 1) // unit
    for group in range(state.groups.shape[0]):
        if state.groups[group, s.IS_STATE]:  # under the key of the tail if there is one
            state.pool.pages[state.table[cell(state, group, row, 0)], MARK] = END
        elif state.groups[group, s.GROWS]:
            if record[s.BRANCH] < prompt_end <= end:
                _mark(state, group, row, prompt_end, PROMPT_END)
            if end > 0 and record[s.COMPUTED] % unit == 0:
                _mark(state, group, row, end, END)


@inner
def _mark(state: ManagerState, group: Int, row: Int, units: Int, mark: Int) -> None:
    column = (units * state.consts[s.UNIT] - 1) // state.groups[group, s.BLOCK_SIZE]
    state.pool.pages[state.table[cell(state, group, row, column)], MARK] = mark


@inner
def expected_worth(state: ManagerState, row: Int, place: Int, worth: Int) -> Int:
    """Return what is left of a worth if a row is gone on from at one kind of place only; at least 1."""
    origin = state.rows[row, s.ORIGIN]
    if origin == NEW:
        worth = worth * state.consts[s.REQUESTS + place] // state.consts[s.REQUESTS]
    elif origin != place:
        worth = 0
    return max(1, worth)


@inner
def attention_worth(state: ManagerState, group: Int, row: Int, column: Int) -> Int:
    """Say what one page of a row is worth that the row lets go of, in tokens; and count that it was asked for.

    Blocks of the same tokens are of use only together, so a block of a window is worth as much by the byte as one of
    full attention, but only where somebody may go on; elsewhere it goes first.
    """
    block_size, worth = state.groups[group, s.BLOCK_SIZE], state.groups[group, s.WORTH]
    record, page = state.rows[row], np.int64(state.table[cell(state, group, row, column)])
    branch = record[s.BRANCH] * state.consts[s.UNIT]
    if column * block_size < branch and column >= _run_start(state, group, branch):
        count_hit(state.pool, page)
    if state.groups[group, s.FIRST_TOKEN] < 0 or state.pool.pages[page, HITS] > 0:
        return worth
    found, computed, prompt = np.int64(0), record[s.COMPUTED], record[s.PROMPT]
    if column >= _run_start(state, group, computed):
        found = expected_worth(state, row, END, worth)
    # a repeated prompt computes its last token again
    prompt_end = (prompt - 1) // state.consts[s.UNIT] * state.consts[s.UNIT]
    if column * block_size < prompt and column >= _run_start(state, group, prompt_end):
        found = max(found, expected_worth(state, row, PROMPT_END, worth))
    return found


@inner
def _run_start(state: ManagerState, group: Int, num_tokens: Int) -> Int:
    # the first column that somebody reads who goes on behind so many tokens
    return s.first_read(state, group, num_tokens) // state.groups[group, s.BLOCK_SIZE]
