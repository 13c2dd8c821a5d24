"""Which cached page goes first. Compiled; a page's value is what it saves per byte, and counts from when it was cached.

A page gets the priority `age + worth * (1 + hits) / page_bytes` when its last reference goes (what it is worth is in
`reuse.py`), and the least priority is evicted first; the age of a stage class is the priority that eviction has
reached. So a page that nobody asks for again sinks, however much it is worth, and of two pages as old the one goes that
saves fewer tokens per byte. This is GreedyDual-Size (Cao and Irani, 1997) with the frequency of Cherkasova (1998); the
cost is the tokens that would have to be computed again, which for a recurrent state are all those before it, as in
Marconi (Pan et al., 2024, which weighs age against saved work by a factor found by trials; here they are one scale, and
nothing needs to be tuned). Pages of different sizes compare by the byte, so that groups keep their balance without
shares of their own.

Worth times hits per byte is rounded to its binary digits, on one scale for all groups: else pages that are of use only
together would round to different values, and the cheaper ones go alone. Then each group needs only one ring per digit,
a page goes to the end of a ring, the oldest of a ring has its least priority, and the cheapest page of a group is at
the front of one of its rings: nothing is sorted. Ring 0 holds what is worth nothing; it goes before everything else.

A slab without a referenced page can be evicted whole. Its price is what its pages are worth by the byte: its free
pages and those worth nothing count in it as gone. A slab with referenced pages can be had too, see `slab_moves.py`.
"""

from __future__ import annotations

import numpy as np

from girih.kv.compiled import inner
from girih.kv.pool_state import (
    CACHED,
    EVICTED,
    HITS,
    IDLE,
    IDLE_HEAD,
    NEXT,
    NUM_RINGS,
    OWNER,
    PAGES_PER_SLAB,
    PREV,
    RING,
    RINGS,
    SCALE,
    SCALE_BITS,
    STAGE_CLASS,
    TOUCHED,
    WARM,
    Int,
    PoolState,
    first_page_of,
    link,
    put_free,
    refile,
    slab_of,
    unlink,
)

IDLE_SLABS_SEEN = 8
"""Of the idle slabs, the price of the oldest few is looked at."""


@inner
def ring_of(pool: PoolState, group: Int, worth: Int, hits: Int) -> Int:
    """Return the ring for a page: the binary digits of what as many bytes as the largest page has are worth."""
    value, ring = worth * (1 + hits), np.int64(0)
    if value > 0:
        value = max(1, (value * pool.groups[group, SCALE] + (1 << (SCALE_BITS - 1))) >> SCALE_BITS)
    while value > 0 and ring < NUM_RINGS - 1:
        value >>= 1
        ring += 1
    return ring


@inner
def priority_of(pool: PoolState, group: Int, ring: Int) -> float | np.floating:
    """Return the priority of a page that goes to the end of a ring now."""
    if ring == 0:
        return 0.0
    return pool.ages[pool.groups[group, STAGE_CLASS]] + pool.ring_values[ring]


@inner
def cache(pool: PoolState, group: Int, slab: Int, page: Int, worth: Int) -> None:
    """Put a page that lost its last reference at the end of its ring; the caller refiles the slab."""
    ring = ring_of(pool, group, worth, pool.pages[page, HITS])
    priority = priority_of(pool, group, ring)
    pool.pages[page, RING] = ring
    pool.priorities[page] = priority
    head = pool.groups[group, RINGS] + ring
    if pool.pages[head, NEXT] == head:
        pool.ring_priorities[group, ring] = priority
    link(pool.pages, PREV, page, head)
    count_cached(pool, group, slab, page, 1)


@inner
def uncache(pool: PoolState, group: Int, slab: Int, page: Int) -> None:
    """Take a cached page out of its ring; the caller refiles the slab."""
    ring = np.int64(pool.pages[page, RING])
    head = pool.groups[group, RINGS] + ring
    following = np.int64(pool.pages[page, NEXT])
    if pool.pages[page, PREV] == head:
        pool.ring_priorities[group, ring] = np.inf if following == head else pool.priorities[following]
    unlink(pool.pages, PREV, page)
    count_cached(pool, group, slab, page, -1)


@inner
def count_cached(pool: PoolState, group: Int, slab: Int, page: Int, change: Int) -> None:
    """Count that a page of a slab became cached (change = 1), or is no more (-1)."""
    pool.slabs[slab, CACHED] += change
    pool.groups[group, CACHED] += change
    pool.ring_counts[group, pool.pages[page, RING]] += change
    if pool.pages[page, RING] > 0:
        pool.slabs[slab, WARM] += change
        pool.groups[group, WARM] += change
        pool.slab_priorities[slab] += change * pool.priorities[page]


@inner
def evict(pool: PoolState, group: Int, page: Int) -> None:
    """Evict a cached page: it becomes free, and its tags are noted and cleared."""
    slab = slab_of(pool, group, page)
    uncache(pool, group, slab, page)
    count = pool.counts[EVICTED]
    pool.evicted[count, 0] = page
    for tag in range(pool.tags.shape[1]):
        pool.evicted[count, 1 + tag] = pool.tags[page, tag]
        pool.tags[page, tag] = 0
    pool.counts[EVICTED] = count + 1
    put_free(pool, slab, page)
    refile(pool, group, slab)


@inner
def cheapest_page(pool: PoolState, group: Int) -> Int:
    """Return the cached page of a group with the least priority, or 0."""
    found, least = np.int64(-1), np.inf
    for ring in range(NUM_RINGS):
        if pool.ring_priorities[group, ring] < least:
            found, least = np.int64(ring), pool.ring_priorities[group, ring]
    return np.int64(pool.pages[pool.groups[group, RINGS] + found, NEXT]) if found >= 0 else np.int64(0)


@inner
def _price(pool: PoolState, stage_class: Int, slab: Int) -> float | np.floating:
    # of an idle slab, on the scale of its pages' priorities
    age, warm = pool.ages[stage_class], pool.slabs[slab, WARM]
    above = max(0.0, pool.slab_priorities[slab] - warm * age)
    return age + above / pool.groups[pool.slabs[slab, OWNER], PAGES_PER_SLAB]


@inner
def _evict_slab(pool: PoolState, slab: Int) -> None:
    group = np.int64(pool.slabs[slab, OWNER])
    first = first_page_of(pool, group, slab)
    for page in range(first, first + pool.slabs[slab, TOUCHED]):
        if pool.pages[page, PREV] != 0:
            evict(pool, group, page)


@inner
def cheapest_victim(pool: PoolState, group: Int) -> tuple[float | np.floating, Int]:
    """Find the cheapest room for one more page of a group.

    Returns:
        (its price, on the scale of priorities, inf if nothing can be evicted; an idle slab, or minus a page of the
        group).
    """
    stage_class = pool.groups[group, STAGE_CLASS]
    own = cheapest_page(pool, group)
    price, victim = pool.priorities[own] if own != 0 else np.inf, -own
    head = pool.classes[stage_class, IDLE_HEAD]
    slab = np.int64(pool.slabs[head, IDLE + 1])
    for _ in range(IDLE_SLABS_SEEN):
        if slab == head:
            break
        if pool.slabs[slab, OWNER] != group:  # of its own idle slabs a group needs no more than a page
            slab_price = _price(pool, stage_class, slab)
            if slab_price < price or (slab_price == price and victim <= 0):
                victim, price = slab, slab_price
        slab = np.int64(pool.slabs[slab, IDLE + 1])
    return price, victim


@inner
def evict_victim(pool: PoolState, group: Int, price: float | np.floating, victim: Int) -> None:
    """Evict what `cheapest_victim` found: then a page in a slab of the group is free, or a slab."""
    stage_class = pool.groups[group, STAGE_CLASS]
    pool.ages[stage_class] = max(pool.ages[stage_class], price)
    if victim < 0:
        evict(pool, group, -victim)
    else:
        _evict_slab(pool, victim)
