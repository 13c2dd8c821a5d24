"""What the manager's compiled code asks of the pool: does it fit, take, pin, release. `PagePool` is the Python face.

    fits              would so many more referenced pages find room, whatever must be evicted and moved for it?
    take_page         a page with one reference; evicts and moves as needed
    take_spare_page   the same for what is only worth keeping while there is room: moves nothing, may be refused
    pin_page          one reference more; a cached page is cached no longer
    count_hit         a page that is asked for again and again is worth more
    release_page      one less; the last one leaves it cached if it is tagged, else free

After a call that takes pages, `pool.evicted` names the pages that are not cached any more, and `pool.moves` those that
have another number: one call of `take_page` moves pages of one group only, each once, and no page to where another
one was. A cached page may be evicted where it moved to, for a better one that takes its place: moves are made in order.
Both must be drained before pages are tagged or released again.
"""

from __future__ import annotations

import numpy as np

from girih.kv.compiled import entry, inner
from girih.kv.eviction import cache, cheapest_victim, evict, evict_victim, priority_of, ring_of, uncache
from girih.kv.pool_state import (
    COLUMN,
    END_GROUP,
    FIRST_GROUP,
    FREE_SLABS,
    HITS,
    MARK,
    MAX_MOVES,
    MOVES,
    NEEDED_SLABS,
    NEXT,
    NUM_RINGS,
    NUM_SLABS,
    PAGES_PER_SLAB,
    REFS,
    RINGS,
    ROOM,
    STAGE_CLASS,
    Int,
    PoolState,
    count_reference,
    fullest_slab,
    lend,
    pop_free,
    put_free,
    refile,
    slab_of,
)
from girih.kv.slab_moves import slab_with_room

__all__ = [
    "PoolState", "count_hit", "evict", "evict_all", "fits", "pin_page", "release_page", "take_page", "take_spare_page",
]  # fmt: skip

MAX_HITS = 7
"""A page that was asked for more often is worth no more."""


@inner
def fits(pool: PoolState, extra: np.ndarray) -> bool | np.bool:
    """Tell whether so many more referenced pages fit, per stage class: sum of ceil(referenced / pages per slab).

    If so, `take_page` succeeds for all of them, in any order over the groups. It is exact, unless more moves wait to be
    drained than a step ever makes.

    Args:
        pool: the pool.
        extra: int64 [groups]; pages to take, and cached pages to pin.
    """
    if pool.counts[MOVES] > pool.counts[MAX_MOVES]:
        return False
    groups = pool.groups
    for stage_class in range(pool.classes.shape[0]):
        needed = pool.classes[stage_class, NEEDED_SLABS]
        for group in range(pool.classes[stage_class, FIRST_GROUP], pool.classes[stage_class, END_GROUP]):
            more = extra[group] - groups[group, ROOM]
            if more > 0:
                needed += (more - 1) // groups[group, PAGES_PER_SLAB] + 1
        if needed > pool.classes[stage_class, NUM_SLABS]:
            return False
    return True


@inner
def take_page(pool: PoolState, group: Int, column: Int) -> Int:
    """Take a page; see above for what else may change.

    Args:
        pool: the pool.
        group: the group.
        column: the block table column that will hold it; it goes along when the page moves.

    Returns:
        The page, with one reference; 0 only if `fits` would have said no.
    """
    slab = slab_with_room(pool, group)
    return _take_from(pool, group, slab, column) if slab != 0 else np.int64(0)


@inner
def take_spare_page(pool: PoolState, group: Int, column: Int, worth: Int) -> Int:
    """Take a page if one is free, or holds what is worth less; for what can be done without.

    It counts as referenced like any other until it is released, and it is refused where that would need a move.

    Args:
        pool: the pool.
        group: the group.
        column: as in `take_page`.
        worth: tokens that it will save, as in `release_page`.

    Returns:
        The page, with one reference, or 0.
    """
    stage_class = pool.groups[group, STAGE_CLASS]
    slab = fullest_slab(pool, group)
    if slab == 0 and pool.classes[stage_class, FREE_SLABS] == 0:
        price, victim = cheapest_victim(pool, group)
        if price >= priority_of(pool, group, ring_of(pool, group, worth, 0)):
            return np.int64(0)
        evict_victim(pool, group, price, victim)
        slab = fullest_slab(pool, group)
    if slab == 0:
        lend(pool, group)
        slab = fullest_slab(pool, group)
    return _take_from(pool, group, slab, column)


@inner
def pin_page(pool: PoolState, group: Int, page: Int) -> None:
    """Add a reference to a referenced or cached page: somebody found it."""
    pages = pool.pages
    if pages[page, REFS] == 0:
        slab = slab_of(pool, group, page)
        uncache(pool, group, slab, page)
        count_reference(pool, group, slab, 1)
        refile(pool, group, slab)
    pages[page, REFS] += 1


@inner
def count_hit(pool: PoolState, page: Int) -> None:
    """Note that a referenced page was asked for once more; it counts when the page is cached."""
    pool.pages[page, HITS] = min(pool.pages[page, HITS] + 1, MAX_HITS)


@inner
def release_page(pool: PoolState, group: Int, page: Int, worth: Int) -> None:
    """Drop a reference; the last one leaves the page cached if it is tagged, else free.

    Args:
        pool: the pool.
        group: the group.
        page: the page.
        worth: tokens that would have to be computed again if it were gone; 0 goes first. Of pages that are worth the
            same, the one released first goes first.
    """
    pool.pages[page, REFS] -= 1
    if pool.pages[page, REFS] > 0:
        return
    slab = slab_of(pool, group, page)
    count_reference(pool, group, slab, -1)
    if pool.tags[page, 0] > 0:
        cache(pool, group, slab, page, worth)
    else:
        put_free(pool, slab, page)
    refile(pool, group, slab)


@entry
def evict_all(pool: PoolState) -> None:
    """Evict every cached page."""
    for group in range(pool.groups.shape[0]):
        for ring in range(NUM_RINGS):
            head = pool.groups[group, RINGS] + ring
            while pool.pages[head, NEXT] != head:
                evict(pool, group, np.int64(pool.pages[head, NEXT]))


@inner
def _take_from(pool: PoolState, group: Int, slab: Int, column: Int) -> Int:
    page = pop_free(pool, group, slab)
    pool.pages[page, REFS] = 1
    pool.pages[page, COLUMN] = column
    pool.pages[page, HITS] = 0
    pool.pages[page, MARK] = 0
    count_reference(pool, group, slab, 1)
    refile(pool, group, slab)
    return page
