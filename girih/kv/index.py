"""The prefix index: from a key to the pages that hold what it stands for, one per group. Compiled.

    key (128 bits) -> slot -> entry -> [page in group 0, page in group 1, ...]      0: this group has none (any more)
    page -> tags = its entries                                                       none: nobody can find this page

A key stands for all tokens of a sequence up to the end of a unit, or for a tail: all tokens up to the end of a unit
and a few more. An attention group's page holds the last unit (or the tail), a state group's the state behind it. A
page of several units is listed under each of them. An entry knows how far behind it the tail listed last ends: less
than a unit, or more where only states are kept and not every unit is listed.

The full key is stored and compared. The slots are an open-addressing table of entry numbers with linear probing, at
most half full; keys are random, so their low bits are the slot. An entry is deleted with its last page.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from girih.kv.compiled import inner

Int = int | np.integer


class IndexState(NamedTuple):
    """The arrays of one index.

    Args:
        slots: int32 [power of two]; entry numbers, 0 is empty.
        keys: uint64 [capacity + 1, 2]; the key of each entry.
        pages: int32 [capacity + 1, num_groups]; page numbers as the pool counts them; row 0 stays 0.
        tails: int32 [capacity + 1]; tokens from each entry to the end of the tail listed last behind it, 0 for none.
        free: int32 [capacity]; a stack of entries not in use.
        counts: int64 [1]; the entries on that stack.
    """

    slots: np.ndarray
    keys: np.ndarray
    pages: np.ndarray
    tails: np.ndarray
    free: np.ndarray
    counts: np.ndarray


def make_index(capacity: int, num_groups: int) -> IndexState:
    """Make an empty index for up to `capacity` entries."""
    num_slots = 1 << max(1, (2 * capacity - 1).bit_length())
    return IndexState(
        slots=np.zeros(num_slots, dtype=np.int32),
        keys=np.zeros((capacity + 1, 2), dtype=np.uint64),
        pages=np.zeros((capacity + 1, num_groups), dtype=np.int32),
        tails=np.zeros(capacity + 1, dtype=np.int32),
        free=np.arange(capacity, 0, -1, dtype=np.int32),
        counts=np.array([capacity], dtype=np.int64),
    )


@inner
def slot_of(index: IndexState, low: np.uint64, high: np.uint64) -> np.int64:
    """Return where the key is, or the empty slot where it would go."""
    mask = index.slots.shape[0] - 1
    slot = np.int64(low & np.uint64(mask))
    while index.slots[slot] != 0:
        entry = index.slots[slot]
        if index.keys[entry, 0] == low and index.keys[entry, 1] == high:
            break
        slot = (slot + 1) & mask
    return slot


@inner
def find_entry(index: IndexState, low: np.uint64, high: np.uint64) -> Int:
    """Return the entry of a key, 0 if there is none."""
    return index.slots[slot_of(index, low, high)]


@inner
def entry_at(index: IndexState, slot: Int, low: np.uint64, high: np.uint64) -> Int:
    """Return the entry in a key's slot, a new one without pages if it is empty; the caller gives it a page."""
    if index.slots[slot] == 0:
        index.counts[0] -= 1
        entry = index.free[index.counts[0]]
        index.slots[slot] = entry
        index.keys[entry, 0] = low
        index.keys[entry, 1] = high
        index.tails[entry] = 0
    return index.slots[slot]


@inner
def drop_page(index: IndexState, entry: Int, group: Int) -> None:
    """Unlist a group's page; delete an entry left without any page."""
    index.pages[entry, group] = 0
    for other in range(index.pages.shape[1]):
        if index.pages[entry, other] != 0:
            return
    _delete_slot(index, slot_of(index, index.keys[entry, 0], index.keys[entry, 1]))
    index.free[index.counts[0]] = entry
    index.counts[0] += 1


@inner
def _delete_slot(index: IndexState, hole: np.int64) -> None:
    # close the gap: an entry further on moves into it unless its own slot lies between the gap and where it is
    mask = index.slots.shape[0] - 1
    slot = hole
    while True:
        slot = (slot + 1) & mask
        entry = index.slots[slot]
        if entry == 0:
            break
        home = np.int64(index.keys[entry, 0] & np.uint64(mask))
        if ((slot - home) & mask) >= ((slot - hole) & mask):
            index.slots[hole] = entry
            hole = slot
    index.slots[hole] = 0
