"""The manager's record of what became findable and what is gone, until somebody takes it. Compiled.

    publish, evict -> records: (listed or unlisted, group, entry), the key, in order
    per entry      -> the key before it, its depth, its tokens: what a record of a listed unit is told with

All arrays are empty where nobody wants to know. The list of records is bounded: when it is full, or everything was
forgotten at once, the next one who takes them gets "all cleared" and then every unit that is findable now. So nothing
is ever lost without a word, and whoever never asks costs no more memory. A manager begins like this too: who listened
to one before it learns that its units are gone.

A tail, which fills no unit, is not told: nobody else could ask for it.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from girih.kv.compiled import inner
from girih.kv.events import KVEvents
from girih.kv.index import IndexState
from girih.kv.retention import Retention

Int = int | np.integer

MAX_RECORDS = 1 << 16
"""Records between two calls of `take_events`; beyond them everything is told anew."""

# columns of EventLog.records, and values of KIND
KIND, GROUP, ENTRY, IS_PRIVATE = range(4)
LISTED, UNLISTED = 0, 1
# elements of EventLog.counts
NUM_RECORDS, IS_ANEW = 0, 1


class EventLog(NamedTuple):
    """The arrays of one log.

    Args:
        records: int32 [MAX_RECORDS, 4].
        keys: uint64 [MAX_RECORDS, 2]; of each record.
        counts: int64 [2]; records now, and whether everything must be told anew.
        open_root: uint64 [2]; the key before the first unit of requests without a salt.
        parents: uint64 [entries, 2]; the key before each entry's.
        depths: int32 [entries]; units up to each entry's, itself counted; 0 for a tail.
        token_ids: int32 [entries, unit]; the tokens of each entry's unit, unless it is private.
        is_private: bool [entries]; it is of requests with a salt.
        row_tokens: int32 [max_num_seqs, longest request + unit]; the tokens of each row's full units.
    """

    records: np.ndarray
    keys: np.ndarray
    counts: np.ndarray
    open_root: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    token_ids: np.ndarray
    is_private: np.ndarray
    row_tokens: np.ndarray


def make_event_log(
    is_on: bool, *, num_entries: int, unit: int, max_num_seqs: int, longest: int, open_root: np.ndarray
) -> EventLog:
    """Make a log.

    Args:
        is_on: whether anybody will ask.
        num_entries: of the index.
        unit: tokens.
        max_num_seqs: rows.
        longest: tokens of the longest request.
        open_root: uint64 [2]; see above.
    """
    num_records, num_entries, max_num_seqs = (n * is_on for n in (MAX_RECORDS, num_entries, max_num_seqs))
    return EventLog(
        records=np.zeros((num_records, 4), dtype=np.int32),
        keys=np.zeros((num_records, 2), dtype=np.uint64),
        counts=np.array([0, is_on], dtype=np.int64),
        open_root=open_root,
        parents=np.zeros((num_entries, 2), dtype=np.uint64),
        depths=np.zeros(num_entries, dtype=np.int32),
        token_ids=np.zeros((num_entries, unit), dtype=np.int32),
        is_private=np.zeros(num_entries, dtype=np.bool_),
        row_tokens=np.zeros((max_num_seqs, longest + unit), dtype=np.int32),
    )


@inner
def is_wanted(log: EventLog) -> bool:
    """Tell whether anybody will ask."""
    return log.records.shape[0] > 0


@inner
def note_tokens(log: EventLog, row: Int, first: Int, token_ids: np.ndarray) -> None:
    """Keep tokens, int32 [n], as those of a row from position `first` on."""
    for i in range(token_ids.shape[0]):
        log.row_tokens[row, first + i] = token_ids[i]


@inner
def note_listed(
    log: EventLog, index: IndexState, group: Int, entry: Int, row: Int, units: Int, parent: np.ndarray, root: np.ndarray
) -> None:
    """Note that an entry is listed for a group, and what is told of it.

    Args:
        log: the log.
        index: has the entry.
        group: the group.
        entry: the entry.
        row: whose key it is listed under.
        units: how many of the row's units the key stands for; 0 for a tail.
        parent: uint64 [2]; the key before it.
        root: uint64 [2]; the key before the row's first unit.
    """
    log.depths[entry] = units
    if units == 0:
        return
    log.parents[entry, 0], log.parents[entry, 1] = parent[0], parent[1]
    is_private = root[0] != log.open_root[0] or root[1] != log.open_root[1]
    log.is_private[entry] = is_private
    size = log.token_ids.shape[1]
    for i in range(size):
        log.token_ids[entry, i] = 0 if is_private else log.row_tokens[row, (units - 1) * size + i]
    _append(log, index, LISTED, group, entry)


@inner
def note_unlisted(log: EventLog, index: IndexState, group: Int, entry: Int) -> None:
    """Note that an entry, still in the index, is no longer listed for a group."""
    if log.depths[entry] > 0:
        _append(log, index, UNLISTED, group, entry)


@inner
def _append(log: EventLog, index: IndexState, kind: Int, group: Int, entry: Int) -> None:
    count = log.counts[NUM_RECORDS]
    if count == log.records.shape[0]:
        log.counts[IS_ANEW] = 1
        return
    log.records[count, KIND], log.records[count, GROUP], log.records[count, ENTRY] = kind, group, entry
    log.records[count, IS_PRIVATE] = log.is_private[entry]
    log.keys[count, 0], log.keys[count, 1] = index.keys[entry, 0], index.keys[entry, 1]
    log.counts[NUM_RECORDS] = count + 1


def tell_anew(log: EventLog) -> None:
    """Let the next one who takes events be told everything anew, as after everything was forgotten."""
    log.counts[IS_ANEW] = len(log.records) > 0


def take_events(log: EventLog, index: IndexState, retentions: tuple[Retention, ...]) -> KVEvents:
    """Return what has happened since the last call; nothing if the log is off.

    Args:
        log: the log.
        index: of the same manager.
        retentions: of its groups.
    """
    is_anew, count = bool(log.counts[IS_ANEW]), int(log.counts[NUM_RECORDS])
    if not (is_anew or count):
        return _nothing(log.token_ids.shape[1], retentions)
    log.counts[:] = 0
    if is_anew:
        entries = index.slots[index.slots > 0]
        entries = entries[log.depths[entries] > 0]
        entries = entries[np.argsort(log.depths[entries], kind="stable")]  # no unit before the one that it follows
        at, groups = np.nonzero(index.pages[entries])
        entries = entries[at]
        is_removed, keys, is_private = np.zeros(len(at), dtype=bool), index.keys[entries], log.is_private[entries]
    else:
        records, keys = log.records[:count], log.keys[:count]
        groups, entries = records[:, GROUP], records[:, ENTRY]
        is_removed, is_private = records[:, KIND] == UNLISTED, records[:, IS_PRIVATE] > 0
        # what was listed and is gone again is not told, as its tokens may be another's by now: that it is gone, is
        is_current = (index.pages[entries, groups] != 0) & (index.keys[entries] == keys).all(axis=1)
        told = is_removed | is_current
        groups, entries, is_removed = groups[told], entries[told], is_removed[told]
        keys, is_private = keys[told], is_private[told]
    is_listed = ~is_removed
    return KVEvents(
        is_cleared=is_anew,
        unit_tokens=log.token_ids.shape[1],
        retentions=retentions,
        is_removed=is_removed,
        groups=groups.astype(np.int32),
        keys=keys,
        parents=log.parents[entries] * is_listed[:, None],
        depths=log.depths[entries] * is_listed,
        token_ids=log.token_ids[entries] * is_listed[:, None],
        is_private=is_private,
    )


@cache
def _nothing(unit: int, retentions: tuple[Retention, ...]) -> KVEvents:
    # as after most steps of decodes
    numbers, keys = np.zeros(0, dtype=np.int32), np.zeros((0, 2), dtype=np.uint64)
    tokens, flags = np.zeros((0, unit), dtype=np.int32), np.zeros(0, dtype=bool)
    return KVEvents(False, unit, retentions, flags, numbers, keys, keys, numbers, tokens, flags)
