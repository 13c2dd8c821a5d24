"""Everything the manager knows at run time, as arrays: what its compiled functions take as one argument.

    rows      one record per running request: how many tokens are known, computed, hashed, published
    spans     per group and row, the live columns of its block table, and those that the workers know
    table     all block tables, one behind the other; group g's is [max_num_seqs, columns]:

        |  0   1   2  ...  width-1  |  source  |  cut 0 .. cut 3  |
           page numbers, 0: none       one page   state groups only

A page number counts over all groups from 1, as the pool does; a page id, which workers know, is its number within
its group. `source` is the page that a request starts from and may not write: the checkpoint it reads, or the block
that its reused prefix ends in, to be copied. A cut is a page that gets the state after some token of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import numpy as np

from girih.kv.compiled import inner
from girih.kv.config import KVCacheConfig, KVCacheGroupSpec
from girih.kv.event_log import EventLog, make_event_log
from girih.kv.grouping import DEFAULT_BLOCK_TOKENS
from girih.kv.index import IndexState, make_index
from girih.kv.pool_state import PoolState

Int = int | np.integer

MAX_CUTS = 4
"""Checkpoints that one request can leave in one step; of more, the last ones are taken."""

# columns of ManagerState.groups
BLOCK_SIZE, WIDTH, COLUMNS, TABLE, IS_STATE, GROWS, TRIM, FIRST_TOKEN, WINDOW_PAGES, WORTH = range(10)
# columns of ManagerState.rows
COMPUTED, KNOWN, HASHED, PUBLISHED, PROMPT, BRANCH, GROW_AT, RELEASE_AT, CHECKPOINT, HELD, DIRTY, LISTED = range(12)
ORIGIN = 12  # see `reuse.py`
# columns of ManagerState.spans
FIRST, LAST, SENT_FIRST, SENT_LAST = 0, 1, 2, 3
# elements of ManagerState.consts
UNIT, LOOKAHEAD, CACHING, CHECKPOINT_TOKENS, LONGEST, NUM_DIRTY, NUM_COPIES, NUM_FIXED, HAS_STATES, MID_UNITS = range(
    10
)
REQUESTS = 10  # and behind it how many of them went on where another one ended, and where another's prompt ended
# elements of ManagerState.stats
LOOKED_UP, HIT, LOST_TO_STATE, LOST_TO_WINDOW, PAGES_EVICTED, PAGES_MOVED, CHECKPOINTS, CHECKPOINTS_DENIED = range(8)

# elements of PromptState.hits[i]: tokens to reuse; the entry of the tail that they end with, or 0; units that any group
# knows; tokens that could be reused too, but for a missing state, and but for missing pages of a window
TOKENS, TAIL, UNITS, MISSING_STATE, MISSING_WINDOW = range(5)

NEVER = 1 << 62


class PromptState(NamedTuple):
    """The prompt that was asked about last, and what of it is cached: a waiting one is asked about in every step.

    Args:
        token_ids: int32 [longest request].
        length: int64 [1]; its tokens, -1 for no prompt yet.
        root: uint64 [2]; the key before its first unit.
        keys: uint64 [units of the longest request, 2].
        found: int32 [units, num_groups]; pages that are listed under its keys.
        num_cached: int32 [units + 1, num_groups]; how many of the units before each boundary have a page.
        hits: int64 [2, 5]; what can be reused, and the record of nothing.
    """

    token_ids: np.ndarray
    length: np.ndarray
    root: np.ndarray
    keys: np.ndarray
    found: np.ndarray
    num_cached: np.ndarray
    hits: np.ndarray


class ManagerState(NamedTuple):
    """The arrays of one manager.

    Args:
        pool: the pages.
        prefix_index: what can be found.
        prompt: what was looked for last.
        groups: int64 [num_groups, 10]; facts of each group.
        rows: int64 [max_num_seqs, 13].
        spans: int64 [num_groups, max_num_seqs, 4].
        table: int32 [all cells]; page numbers.
        holders: int32 [pages + 1]; a row that took or pinned the page, to find its cell quickly when it moves.
        keys: uint64 [max_num_seqs, units of the longest request, 2]; keys of each row's full units.
        roots: uint64 [max_num_seqs, 2]; the key before each row's first unit.
        tails: int32 [max_num_seqs, unit]; known tokens behind each row's last full unit.
        cuts: int64 [max_num_seqs, MAX_CUTS]; behind which token each cut of the step is, 0 for none.
        first_tokens: int32; for groups that forget, the first token that a continuation from each length reads.
        copies: int32 [max_num_seqs * num_groups, 3]; (group, row, column) to copy the row's source to.
        dirty: int32 [max_num_seqs]; rows with something to tell the workers.
        need: int64 [num_groups]; pages, while they are counted.
        secret: uint64 [2]; of the hash.
        consts: int64 [13].
        stats: int64 [8].
        log: what became findable and what is gone, if anybody wants to know.
    """

    pool: PoolState
    prefix_index: IndexState
    prompt: PromptState
    groups: np.ndarray
    rows: np.ndarray
    spans: np.ndarray
    table: np.ndarray
    holders: np.ndarray
    keys: np.ndarray
    roots: np.ndarray
    tails: np.ndarray
    cuts: np.ndarray
    first_tokens: np.ndarray
    copies: np.ndarray
    dirty: np.ndarray
    need: np.ndarray
    secret: np.ndarray
    consts: np.ndarray
    stats: np.ndarray
    log: EventLog


def unit_tokens(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Return the tokens of a unit: what every block size is a multiple of, 16 where they allow."""
    return gcd(DEFAULT_BLOCK_TOKENS, *(group.block_size for group in groups if not group.retention.holds_state))


def make_state(
    configs: Sequence[KVCacheConfig], pool: PoolState, *, max_num_seqs: int, secret: np.ndarray, open_root: np.ndarray,
    caching: bool, log_events: bool, checkpoint_tokens: int,
) -> ManagerState:  # fmt: skip
    """Make the arrays of a new manager.

    Args:
        configs: one plan per stage class.
        pool: the pages of all their groups.
        max_num_seqs: rows.
        secret: uint64 [2].
        open_root: uint64 [2]; the key before the first unit of requests without a salt.
        caching: whether prefixes are reused.
        log_events: whether what becomes findable and what is gone is told.
        checkpoint_tokens: distance of the checkpoints within a prompt.
    """
    groups = [group for config in configs for group in config.groups]
    longest, lookahead = configs[0].max_model_len, configs[0].num_lookahead_tokens
    unit = unit_tokens(groups)
    facts, first_tokens = _group_facts(groups, longest, lookahead, max_num_seqs)
    cells = int((facts[:, COLUMNS] * max_num_seqs).sum())
    per_page = pool.tags.shape[1]
    consts = np.zeros(13, dtype=np.int64)
    consts[REQUESTS:] = 1
    consts[[UNIT, LOOKAHEAD, CACHING, CHECKPOINT_TOKENS]] = unit, lookahead, caching, checkpoint_tokens
    consts[LONGEST] = longest
    consts[HAS_STATES] = facts[:, IS_STATE].any()
    consts[MID_UNITS] = (facts[facts[:, IS_STATE] == 0, BLOCK_SIZE] > unit).any()
    prefix_index = make_index(len(pool.evicted) * per_page if caching else 1, len(groups))
    return ManagerState(
        pool=pool,
        prefix_index=prefix_index,
        prompt=_make_prompt(longest, unit, len(groups)),
        groups=facts,
        rows=np.zeros((max_num_seqs, 13), dtype=np.int64),
        spans=np.zeros((len(groups), max_num_seqs, 4), dtype=np.int64),
        table=np.zeros(cells, dtype=np.int32),
        holders=np.zeros(len(pool.tags), dtype=np.int32),
        keys=np.zeros((max_num_seqs, longest // unit + 1, 2), dtype=np.uint64),
        roots=np.zeros((max_num_seqs, 2), dtype=np.uint64),
        tails=np.zeros((max_num_seqs, unit), dtype=np.int32),
        cuts=np.zeros((max_num_seqs, MAX_CUTS), dtype=np.int64),
        first_tokens=first_tokens,
        copies=np.zeros((max_num_seqs * max(1, len(groups)), 3), dtype=np.int32),
        dirty=np.zeros(max_num_seqs, dtype=np.int32),
        need=np.zeros(len(groups), dtype=np.int64),
        secret=secret,
        consts=consts,
        stats=np.zeros(8, dtype=np.int64),
        log=make_event_log(
            log_events,
            num_entries=len(prefix_index.keys),
            unit=unit,
            max_num_seqs=max_num_seqs,
            longest=longest,
            open_root=open_root,
        ),
    )


def _make_prompt(longest: int, unit: int, num_groups: int) -> PromptState:
    units = longest // unit + 1
    return PromptState(
        token_ids=np.zeros(longest, dtype=np.int32),
        length=np.array([-1], dtype=np.int64),
        root=np.zeros(2, dtype=np.uint64),
        keys=np.zeros((units, 2), dtype=np.uint64),
        found=np.zeros((units, num_groups), dtype=np.int32),
        num_cached=np.zeros((units + 1, num_groups), dtype=np.int32),
        hits=np.zeros((2, 5), dtype=np.int64),
    )


def _group_facts(
    groups: Sequence[KVCacheGroupSpec], longest: int, lookahead: int, max_num_seqs: int
) -> tuple[np.ndarray, np.ndarray]:
    facts = np.zeros((len(groups), 10), dtype=np.int64)
    lengths = np.arange(longest + 2)
    first_tokens: list[np.ndarray] = []
    for index, group in enumerate(groups):
        kept = group.retention
        width = kept.table_width(longest, group.block_size, lookahead)
        record = facts[index]
        record[BLOCK_SIZE], record[WIDTH] = group.block_size, width
        record[COLUMNS] = width + 1 + (MAX_CUTS if kept.holds_state else 0)
        record[IS_STATE], record[TRIM] = kept.holds_state, kept.hit_trim_tokens
        record[GROWS] = kept.table_width(2 * longest, group.block_size, lookahead) > width
        first = np.asarray(kept.hit_first(lengths, 1))
        record[FIRST_TOKEN] = -1
        if first.any():
            record[FIRST_TOKEN] = sum(map(len, first_tokens))
            first_tokens.append(first.astype(np.int32))
            record[WINDOW_PAGES] = kept.blocks_held(longest, group.block_size)
    # blocks of the same tokens are of use only together: a byte of a window's is worth as much as one of full attention
    attention = [group for group in groups if not group.retention.holds_state]
    smallest = min((group.page_size_bytes / group.block_size for group in attention), default=1)
    facts[:, WORTH] = [max(1, round(group.page_size_bytes / smallest)) for group in groups]
    table_cells = facts[:, COLUMNS] * max_num_seqs
    facts[:, TABLE] = np.cumsum(table_cells) - table_cells
    return facts, np.concatenate([np.zeros(0, dtype=np.int32), *first_tokens])


@inner
def first_read(state: ManagerState, group: Int, num_tokens: Int) -> Int:
    """Return the first token that a continuation behind `num_tokens` tokens reads from the cache of a group.

    For a state group it is the last token: the state behind it.
    """
    start = state.groups[group, FIRST_TOKEN]
    return 0 if start < 0 else np.int64(state.first_tokens[start + num_tokens])


@inner
def first_column(state: ManagerState, group: Int, num_tokens: Int) -> Int:
    """Return the first column that a group must keep when `num_tokens` tokens are computed."""
    if state.groups[group, IS_STATE]:
        return 0
    return first_read(state, group, num_tokens) // state.groups[group, BLOCK_SIZE]


@inner
def end_column(state: ManagerState, group: Int, num_tokens: Int) -> Int:
    """Return how many columns a group needs when `num_tokens` tokens, and the lookahead, have a place."""
    if not state.groups[group, GROWS]:
        return state.groups[group, WIDTH]
    block_size = state.groups[group, BLOCK_SIZE]
    return (num_tokens + state.consts[LOOKAHEAD] + block_size - 1) // block_size


@inner
def cell(state: ManagerState, group: Int, row: Int, column: Int) -> Int:
    """Return where a column of a row is in `table`."""
    return state.groups[group, TABLE] + row * state.groups[group, COLUMNS] + column


@inner
def place(state: ManagerState, group: Int, row: Int, column: Int, page: Int) -> None:
    """Put a page into a cell."""
    state.table[cell(state, group, row, column)] = page
    state.holders[page] = row


@inner
def mark_dirty(state: ManagerState, row: Int) -> None:
    """Note that the workers must be told something of a row."""
    if state.rows[row, DIRTY] == 0:
        state.rows[row, DIRTY] = 1
        state.dirty[state.consts[NUM_DIRTY]] = row
        state.consts[NUM_DIRTY] += 1
