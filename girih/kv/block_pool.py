"""The pool: slabs that groups borrow, and the pages in them. Counts references; knows neither requests nor keys.

    free slab --lend--> slab of group g: its pages are   free        handed to nobody
         ^                                               referenced  by at least one block table
         |                                               cached      by none, but tagged: a key leads to it
         +--- when the last page of a slab becomes free

A page is taken from the fullest slab of its group, so that other slabs run empty. A slab with cached pages and no
referenced one is idle: whoever needs a slab may evict it whole. Cached pages wait in two lists per group, oldest
first: cold ones (they left a window) go before warm ones.

What a call may borrow is counted before it takes anything: `slabs_short` is the formula of `capacity.slabs_needed`
for the slabs as they are, and a call that passes it never fails halfway. As long as slabs are to spare, a page comes
from one more slab and cached pages stay; after that, from the group's own slabs.

The compiled work is in `slabs.py`. Pages of all groups are numbered through, from 1; 0 is no page.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from girih.kv import slabs
from girih.kv.slabs import (
    BUCKET,
    BUCKETS,
    BUSY_SLABS,
    CACHED,
    COLD,
    EVICTED,
    FIRST_PAGE,
    FREE_SLABS,
    IDLE,
    NEXT,
    PAGES_PER_SLAB,
    PREV,
    REFERENCED,
    REFS,
    SLABS,
    TAKEN,
    WARM,
    PoolState,
)


class BlockPool:
    """The pages of all groups.

    Args:
        num_slabs: slabs in the pool.
        pages_per_slab: of each group.
    """

    def __init__(self, num_slabs: int, pages_per_slab: Sequence[int]):
        per_slab = np.array(pages_per_slab, dtype=np.int64)
        num_groups = len(per_slab)
        self.num_slabs = num_slabs
        self.first_page = 1 + num_slabs * (np.cumsum(per_slab) - per_slab)
        """int64 [num_groups]; the number of each group's page 0."""
        self.max_pages = num_slabs * int(per_slab.max(initial=0))
        """Pages that there can be at once."""
        num_pages = 1 + num_slabs * int(per_slab.sum())
        buckets = num_slabs + 3 + np.cumsum(per_slab) - per_slab
        self.state = PoolState(
            pages=np.zeros((num_pages + 2 * num_groups, 3), dtype=np.int32),
            tags=np.zeros(num_pages, dtype=np.int32),
            stamps=np.zeros(num_pages, dtype=np.int64),
            slabs=np.zeros((num_slabs + 3 + int(per_slab.sum()), 9), dtype=np.int64),
            groups=np.zeros((num_groups, 11), dtype=np.int64),
            counts=np.array([num_slabs, 0, 0, num_slabs, num_slabs + 1, num_slabs + 2], dtype=np.int64),
            evicted=np.zeros((self.max_pages, 2), dtype=np.int32),
        )
        groups = self.state.groups
        groups[:, PAGES_PER_SLAB], groups[:, FIRST_PAGE], groups[:, BUCKETS] = per_slab, self.first_page, buckets
        groups[:, COLD] = num_pages + 2 * np.arange(num_groups)
        groups[:, WARM] = groups[:, COLD] + 1
        heads = np.arange(num_pages, num_pages + 2 * num_groups)
        self.state.pages[heads, PREV] = self.state.pages[heads, NEXT] = heads
        heads = np.arange(num_slabs + 1, len(self.state.slabs))
        for column in (BUCKET, BUCKET + 1, IDLE, IDLE + 1):
            self.state.slabs[heads, column] = heads
        slabs.fill_free_slabs(self.state)

    @property
    def tags(self) -> np.ndarray:
        """Return the tags, int32 [pages + 1]; whoever makes a referenced page findable writes here."""
        return self.state.tags

    @property
    def references(self) -> np.ndarray:
        """Return how many block tables and pins hold each page, by page number, int32."""
        return self.state.pages[:, REFS]

    def counts(self) -> dict[str, np.ndarray]:
        """Return int64 [num_groups] each: "slabs", "busy_slabs", and the pages that are "free", "cached", "referenced".

        A busy slab has a referenced page.
        """
        groups = self.state.groups
        lent = groups[:, SLABS] * groups[:, PAGES_PER_SLAB]
        return {
            "slabs": groups[:, SLABS].copy(),
            "busy_slabs": groups[:, BUSY_SLABS].copy(),
            "free": lent - groups[:, REFERENCED] - groups[:, CACHED],
            "cached": groups[:, CACHED].copy(),
            "referenced": groups[:, REFERENCED].copy(),
        }

    @property
    def num_free_slabs(self) -> int:
        """Return the slabs that no group has borrowed."""
        return int(self.state.counts[FREE_SLABS])

    def slabs_short(self, need: np.ndarray, floor: np.ndarray, pinned: Sequence[np.ndarray] = ()) -> int:
        """Return how many slabs are missing for a call that takes pages; 0 or less: it will succeed.

        Args:
            need: int64 [num_groups]; pages to take.
            floor: int64 [num_groups]; slabs that each group is promised, used or not.
            pinned: per group, the numbers of cached pages that would be referenced before.
        """
        groups = self.state.groups
        per_slab, busy, referenced = (
            groups[:, PAGES_PER_SLAB],
            groups[:, BUSY_SLABS].copy(),
            groups[:, REFERENCED].copy(),
        )
        for group, pages in enumerate(pinned):
            fresh = pages[self.references[pages] == 0]
            if len(fresh):
                theirs = np.unique((fresh - self.first_page[group]) // per_slab[group]) + 1
                referenced[group] += len(fresh)
                busy[group] += np.count_nonzero(self.state.slabs[theirs, REFERENCED] == 0)
        more = np.maximum(need - (busy * per_slab - referenced), 0)
        return int(np.maximum(busy + -(-more // per_slab), floor).sum()) - self.num_slabs

    def allocate(self, need: np.ndarray, floor: np.ndarray, promised: np.ndarray) -> tuple[int, list[np.ndarray]]:
        """Take pages for several sequences in order; stop before the first that cannot have all of its pages.

        Args:
            need: int64 [n, num_groups]; pages for each sequence.
            floor: int64 [num_groups]; see `slabs_short`: a sequence is served if nothing is short with this floor.
            promised: int64 [num_groups]; slabs that each group is promised, used or not: while they leave none to
                spare, cached pages are evicted from the group's busy slabs rather than another slab taken.

        Returns:
            (sequences served, per group the numbers of their pages in order, int32).
        """
        pages = np.empty((need.shape[1], int(need.sum(axis=0).max())), dtype=np.int32)
        served = int(slabs.allocate_pages(self.state, need.copy(), floor, promised, pages))
        taken = self.state.groups[:, TAKEN].tolist()
        return served, [numbers[:count] for numbers, count in zip(pages, taken, strict=True)]

    def pin(self, group: int, pages: np.ndarray) -> None:
        """Add one reference to each of these referenced or cached pages of a group, int32."""
        slabs.pin_pages(self.state, group, pages)

    def release(self, group: int, pages: np.ndarray, warm: np.ndarray) -> None:
        """Drop one reference from each page; the last one leaves it cached if it is tagged, else free.

        Args:
            group: the pages' group.
            pages: int32 [n]; in the order in which they should be evicted.
            warm: bool [n]; False puts a page among those that are evicted first.
        """
        slabs.release_pages(self.state, group, pages, warm)

    def take_evicted(self) -> np.ndarray:
        """Return page and tag, int32 [n, 2], of what was evicted since the last call; the tags are already gone."""
        count = int(self.state.counts[EVICTED])
        self.state.counts[EVICTED] = 0
        return self.state.evicted[:count]

    def evict(self, group: int, pages: np.ndarray) -> None:
        """Evict these cached pages of a group, int32."""
        slabs.evict_pages(self.state, group, pages)

    def evict_all(self) -> None:
        """Evict every cached page."""
        for group in range(len(self.state.groups)):
            slabs.evict_group(self.state, group)
