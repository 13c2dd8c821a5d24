"""The prefix index: from a block's key to the pages that hold this block, one per group. Compiled, many keys per call.

    key (128 bits) -> slot -> entry -> [page in group 0, page in group 1, ...]      0: this group has none (any more)
    page -> tag = its entry                                                          0: nobody can find this page

The full key is stored and compared. The slots are an open-addressing table of entry numbers with linear probing,
at most half full; keys are random, so their low bits are the slot. A page number is the pool's, counted over all
groups from 1. An entry is deleted with its last page.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from girih.kv.compiled import entry, inner


class IndexState(NamedTuple):
    """The arrays of one index, as the compiled functions take them.

    Args:
        slots: int32 [power of two]; entry numbers, 0 is empty.
        keys: uint64 [capacity + 1, 2]; the key of each entry.
        pages: int32 [capacity + 1, num_groups]; row 0 stays 0.
        free: int32 [capacity]; a stack of entries not in use.
        counts: int64 [1]; the entries on that stack.
        tags: int32 [num_pages]; the pool's: the entry of each page.
    """

    slots: np.ndarray
    keys: np.ndarray
    pages: np.ndarray
    free: np.ndarray
    counts: np.ndarray
    tags: np.ndarray


class PrefixIndex:
    """All findable blocks.

    Args:
        capacity: entries at most; no more than there can be pages at once.
        num_groups: page columns of an entry.
        tags: int32 [num_pages]; the pool's array of page tags, written here when a page is published.
    """

    def __init__(self, capacity: int, num_groups: int, tags: np.ndarray):
        num_slots = 1 << max(1, (2 * capacity - 1).bit_length())
        self._state = IndexState(
            slots=np.zeros(num_slots, dtype=np.int32),
            keys=np.zeros((capacity + 1, 2), dtype=np.uint64),
            pages=np.zeros((capacity + 1, num_groups), dtype=np.int32),
            free=np.arange(capacity, 0, -1, dtype=np.int32),
            counts=np.array([capacity], dtype=np.int64),
            tags=tags,
        )

    @property
    def num_entries(self) -> int:
        """Return how many blocks can be found in at least one group."""
        return len(self._state.free) - int(self._state.counts[0])

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Look keys up.

        Args:
            keys: uint64 [n, 2].

        Returns:
            int32 [n, num_groups]; page numbers, 0 where a group has none.
        """
        pages = np.empty((len(keys), self._state.pages.shape[1]), dtype=np.int32)
        find_pages(self._state, keys, pages)
        return pages

    def publish(self, keys: np.ndarray, pages: np.ndarray, references: np.ndarray) -> np.ndarray:
        """Make pages findable, and tag them.

        A page whose key another page of its group already has replaces it if nobody references that one, and stays
        private otherwise.

        Args:
            keys: uint64 [n, 2].
            pages: int32 [n, num_groups]; page numbers, 0 where there is none.
            references: int32 [num_pages or more]; of every page.

        Returns:
            int32 [n, num_groups]; the pages that were replaced, 0 for none. Their tags are the caller's to clear.
        """
        replaced = np.zeros_like(pages)
        publish_pages(self._state, keys, pages, references, replaced)
        return replaced

    def forget(self, evicted: np.ndarray) -> None:
        """Drop pages that the pool took back.

        Args:
            evicted: int32 [n, 2]; page number and the tag it had.
        """
        forget_pages(self._state, evicted)

    def check(self) -> None:
        """Raise AssertionError unless keys, entries, pages and tags all agree."""
        slots, keys, pages, free, counts, tags = self._state
        entries = np.sort(slots[slots > 0])
        assert len(np.unique(entries)) == len(entries), "an entry is in two slots"
        assert len(entries) == self.num_entries, "slots and free entries do not add up"
        assert not np.isin(entries, free[: counts[0]]).any(), "an entry is both in a slot and free"
        assert (pages[entries] > 0).any(axis=1).all(), "an entry has no page"
        assert np.count_nonzero(pages) == np.count_nonzero(pages[entries]), "a free entry has a page"
        assert np.array_equal(self.find(keys[entries]), pages[entries]), "a key does not lead to its entry"
        tagged = np.flatnonzero(tags)
        assert np.array_equal(np.sort(pages[pages > 0]), tagged), "findable pages and tagged pages differ"
        assert (pages[tags[tagged]] == tagged[:, None]).any(axis=1).all(), "a page's tag is not its entry"


@inner
def _slot_of(index: IndexState, low: np.uint64, high: np.uint64) -> np.int64:
    # where the key is, or the empty slot where it would go
    mask = index.slots.shape[0] - 1
    slot = np.int64(low & np.uint64(mask))
    while index.slots[slot] != 0:
        entry = index.slots[slot]
        if index.keys[entry, 0] == low and index.keys[entry, 1] == high:
            break
        slot = (slot + 1) & mask
    return slot


@entry
def find_pages(index: IndexState, keys: np.ndarray, pages: np.ndarray) -> None:
    """Fill `pages`; see `PrefixIndex.find`."""
    for i in range(keys.shape[0]):
        entry = index.slots[_slot_of(index, keys[i, 0], keys[i, 1])]
        for group in range(pages.shape[1]):
            pages[i, group] = index.pages[entry, group]


@entry
def publish_pages(
    index: IndexState, keys: np.ndarray, pages: np.ndarray, references: np.ndarray, replaced: np.ndarray
) -> None:
    """Insert pages and fill `replaced`; see `PrefixIndex.publish`."""
    for i in range(keys.shape[0]):
        slot = _slot_of(index, keys[i, 0], keys[i, 1])
        for group in range(pages.shape[1]):
            page, known = pages[i, group], index.pages[index.slots[slot], group]
            if page == 0 or page == known or (known != 0 and references[known] > 0):  # noqa: PLR1714
                continue
            if index.slots[slot] == 0:
                index.counts[0] -= 1
                entry = index.free[index.counts[0]]
                index.slots[slot] = entry
                index.keys[entry, 0] = keys[i, 0]
                index.keys[entry, 1] = keys[i, 1]
            replaced[i, group] = known
            index.pages[index.slots[slot], group] = page
            index.tags[page] = index.slots[slot]


@entry
def forget_pages(index: IndexState, evicted: np.ndarray) -> None:
    """Remove pages, where no other has replaced them, and entries left without any; see `PrefixIndex.forget`."""
    for i in range(evicted.shape[0]):
        page, entry = evicted[i, 0], evicted[i, 1]
        left = 0
        for group in range(index.pages.shape[1]):
            if index.pages[entry, group] == page:
                index.pages[entry, group] = 0
            elif index.pages[entry, group] != 0:
                left += 1
        if left == 0:
            _delete_slot(index, _slot_of(index, index.keys[entry, 0], index.keys[entry, 1]))
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
