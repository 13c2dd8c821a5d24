"""The pool's arrays and the compiled functions that lend slabs, take pages, and evict; `BlockPool` is their face.

Everything is a record of integers in a few arrays, and every list is a ring through such records: a column with the
previous record, the next column with the following one, and a head record that closes the ring.

    slab   in one ring by `BUCKET`: free slabs, or the slabs of a group with as many referenced pages and a free one
           (none if it has no free page); in one by `IDLE` while it has cached pages and no referenced one
    page   cached: in its group's cold or warm ring by `PREV`, oldest first; free: in its slab's chain by `NEXT`
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from girih.kv.compiled import entry, inner

Int = int | np.integer

# columns of PoolState.pages; the last rows are the heads of the groups' cold and warm lists
REFS, PREV, NEXT = 0, 1, 2
# columns of PoolState.slabs; slabs count from 1, the last rows are heads: free slabs, idle slabs, every bucket
OWNER, REFERENCED, CACHED, FREE_PAGE, NEWEST, BUCKET, IDLE = 0, 1, 2, 3, 4, 5, 7
# columns of PoolState.groups; REFERENCED and CACHED as above
PAGES_PER_SLAB, SLABS, BUSY_SLABS, FIRST_PAGE, BUCKETS, FULLEST, COLD, WARM, TAKEN = 0, 3, 4, 5, 6, 7, 8, 9, 10
# elements of PoolState.counts
NUM_SLABS, CLOCK, EVICTED, FREE_SLABS, FREE_HEAD, IDLE_HEAD = 0, 1, 2, 3, 4, 5


class PoolState(NamedTuple):
    """The arrays of one pool, as the compiled functions take them; the columns are named above.

    Args:
        pages: int32 [pages + 1 + 2 * groups, 3]; references and links of a list.
        tags: int32 [pages + 1]; 0 is untagged.
        stamps: int64 [pages + 1]; when a warm page was cached.
        slabs: int64 [slabs + 3 + buckets, 9]; owner (-1: none), page counts, first free page, newest stamp, links.
        groups: int64 [groups, 11].
        counts: int64 [6].
        evicted: int32 [n, 2]; page and tag of what was evicted since the last `take_evicted`.
    """

    pages: np.ndarray
    tags: np.ndarray
    stamps: np.ndarray
    slabs: np.ndarray
    groups: np.ndarray
    counts: np.ndarray
    evicted: np.ndarray


@inner
def _link(nodes: np.ndarray, column: Int, node: Int, before: Int) -> None:
    # columns `column` and `column + 1` hold previous and next of a ring; 0 is "in no ring"
    previous = nodes[before, column]
    nodes[previous, column + 1] = node
    nodes[node, column] = previous
    nodes[node, column + 1] = before
    nodes[before, column] = node


@inner
def _unlink(nodes: np.ndarray, column: Int, node: Int) -> None:
    previous, following = nodes[node, column], nodes[node, column + 1]
    nodes[previous, column + 1] = following
    nodes[following, column] = previous
    nodes[node, column] = 0
    nodes[node, column + 1] = 0


@entry
def fill_free_slabs(pool: PoolState) -> None:
    """Put every slab of a new pool among the free ones."""
    for slab in range(1, pool.counts[NUM_SLABS] + 1):
        pool.slabs[slab, OWNER] = -1
        _link(pool.slabs, BUCKET, slab, pool.counts[FREE_HEAD])


@inner
def _slab_of(pool: PoolState, group: Int, page: Int) -> Int:
    return (page - pool.groups[group, FIRST_PAGE]) // pool.groups[group, PAGES_PER_SLAB] + 1


@inner
def _refile(pool: PoolState, slab: Int) -> None:
    # put a slab whose counts changed into its bucket, onto or off the idle list, or back among the free slabs
    slabs, group = pool.slabs, pool.slabs[slab, OWNER]
    referenced, cached = slabs[slab, REFERENCED], slabs[slab, CACHED]
    if slabs[slab, BUCKET] != 0:
        _unlink(slabs, BUCKET, slab)
    if slabs[slab, IDLE] != 0 and (referenced > 0 or cached == 0):
        _unlink(slabs, IDLE, slab)
    if referenced == 0 and cached == 0:
        slabs[slab, OWNER] = -1
        pool.groups[group, SLABS] -= 1
        pool.counts[FREE_SLABS] += 1
        _link(slabs, BUCKET, slab, slabs[pool.counts[FREE_HEAD], BUCKET + 1])
        return
    if referenced == 0 and slabs[slab, IDLE] == 0:
        _link(slabs, IDLE, slab, pool.counts[IDLE_HEAD])
    if referenced + cached < pool.groups[group, PAGES_PER_SLAB]:
        head = pool.groups[group, BUCKETS] + referenced
        _link(slabs, BUCKET, slab, slabs[head, BUCKET + 1])
        pool.groups[group, FULLEST] = max(pool.groups[group, FULLEST], referenced)


@inner
def _put_free(pool: PoolState, slab: Int, page: Int) -> None:
    pool.pages[page, NEXT] = pool.slabs[slab, FREE_PAGE]
    pool.slabs[slab, FREE_PAGE] = page


@inner
def _lend(pool: PoolState, group: Int) -> Int:
    slab = pool.slabs[pool.counts[FREE_HEAD], BUCKET + 1]
    _unlink(pool.slabs, BUCKET, slab)
    pool.counts[FREE_SLABS] -= 1
    pool.groups[group, SLABS] += 1
    pool.slabs[slab, OWNER] = group
    pool.slabs[slab, NEWEST] = pool.slabs[slab, FREE_PAGE] = 0
    per_slab = pool.groups[group, PAGES_PER_SLAB]
    first = pool.groups[group, FIRST_PAGE] + (slab - 1) * per_slab
    for page in range(first + per_slab - 1, first - 1, -1):
        _put_free(pool, slab, page)
    return slab


@inner
def _count_reference(pool: PoolState, group: Int, slab: Int, change: Int) -> None:
    # a page became referenced (change = 1) or lost its last reference (-1)
    pool.groups[group, REFERENCED] += change
    pool.groups[group, BUSY_SLABS] -= pool.slabs[slab, REFERENCED] > 0
    pool.slabs[slab, REFERENCED] += change
    pool.groups[group, BUSY_SLABS] += pool.slabs[slab, REFERENCED] > 0


@inner
def _uncache(pool: PoolState, group: Int, slab: Int, page: Int) -> None:
    _unlink(pool.pages, PREV, page)
    pool.slabs[slab, CACHED] -= 1
    pool.groups[group, CACHED] -= 1


@inner
def _evict(pool: PoolState, group: Int, page: Int) -> Int:
    # returns the slab, which the caller refiles
    slab = _slab_of(pool, group, page)
    _uncache(pool, group, slab, page)
    count = pool.counts[EVICTED]
    pool.evicted[count, 0] = page
    pool.evicted[count, 1] = pool.tags[page]
    pool.counts[EVICTED] = count + 1
    pool.tags[page] = 0
    _put_free(pool, slab, page)
    return slab


@inner
def _evict_slab(pool: PoolState, slab: Int) -> None:
    group = pool.slabs[slab, OWNER]
    first = pool.groups[group, FIRST_PAGE] + (slab - 1) * pool.groups[group, PAGES_PER_SLAB]
    for page in range(first, first + pool.groups[group, PAGES_PER_SLAB]):
        if pool.tags[page] != 0:
            _evict(pool, group, page)
    _refile(pool, slab)


@entry
def evict_pages(pool: PoolState, group: Int, pages: np.ndarray) -> None:
    """Evict these cached pages of a group."""
    for i in range(pages.shape[0]):
        _refile(pool, _evict(pool, group, np.int64(pages[i])))


@entry
def evict_group(pool: PoolState, group: Int) -> None:
    """Evict every cached page of a group."""
    for head in (pool.groups[group, COLD], pool.groups[group, WARM]):
        while pool.pages[head, NEXT] != head:
            _refile(pool, _evict(pool, group, np.int64(pool.pages[head, NEXT])))


@inner
def _spare_slabs(pool: PoolState, need: np.ndarray, floor: np.ndarray) -> Int:
    # the same formula as BlockPool.slabs_short, for need: int64 [num_groups]
    spare = pool.counts[NUM_SLABS]
    for group in range(need.shape[0]):
        per_slab, busy = pool.groups[group, PAGES_PER_SLAB], pool.groups[group, BUSY_SLABS]
        more = max(0, need[group] - (busy * per_slab - pool.groups[group, REFERENCED]))
        spare -= max(busy + (more + per_slab - 1) // per_slab, floor[group])
    return spare


@inner
def _fullest_slab(pool: PoolState, group: Int) -> Int:
    # the busy slab with a free page that has the most referenced ones, or 0
    fill = pool.groups[group, FULLEST]
    head = pool.groups[group, BUCKETS] + fill
    while fill > 0 and pool.slabs[head, BUCKET + 1] == head:
        fill, head = fill - 1, head - 1
    pool.groups[group, FULLEST] = fill
    return pool.slabs[head, BUCKET + 1] if fill > 0 else 0


@inner
def _oldest(pool: PoolState, group: Int, head: Int, any_slab: bool | np.bool) -> Int:
    # the first page of a list, in a busy slab unless any will do; 0 if there is none
    page = np.int64(pool.pages[head, NEXT])
    while page != head and not any_slab and pool.slabs[_slab_of(pool, group, page), REFERENCED] == 0:
        page = np.int64(pool.pages[page, NEXT])
    return 0 if page == head else page


@inner
def _make_room(pool: PoolState, group: Int, borrow: bool | np.bool) -> Int:
    # the slab, with a free page now; `borrow`: it may be one that is not busy yet
    record = pool.groups[group]
    if borrow:
        idle = pool.slabs[record[BUCKETS], BUCKET + 1]
        if idle != record[BUCKETS]:
            return idle
        if pool.counts[FREE_SLABS] > 0:
            return _lend(pool, group)
    cold = _oldest(pool, group, record[COLD], borrow)
    if cold != 0:
        return _evict(pool, group, cold)
    warm = _oldest(pool, group, record[WARM], borrow)
    head = pool.counts[IDLE_HEAD]
    idle = pool.slabs[head, IDLE + 1]
    if borrow and idle != head and (warm == 0 or pool.slabs[idle, NEWEST] < pool.stamps[warm]):
        _evict_slab(pool, idle)
        return _lend(pool, group)
    return _evict(pool, group, warm)


@entry
def allocate_pages(
    pool: PoolState, left: np.ndarray, floor: np.ndarray, promised: np.ndarray, pages: np.ndarray
) -> Int:
    """Take pages and return the sequences served; see `BlockPool.allocate`.

    Args:
        pool: the pool.
        left: int64 [n, num_groups]; the pages to take, counted down.
        floor: int64 [num_groups].
        promised: int64 [num_groups].
        pages: int32 [num_groups, most pages of a group]; filled with the pages taken.
    """
    groups = pool.groups
    for group in range(left.shape[1]):
        groups[group, TAKEN] = 0
    for i in range(left.shape[0]):
        if _spare_slabs(pool, left[i], floor) < 0:
            return i
        for group in range(left.shape[1]):
            while left[i, group] > 0:
                slab = _fullest_slab(pool, group)
                if slab == 0:
                    full = groups[group, BUSY_SLABS] * groups[group, PAGES_PER_SLAB] == groups[group, REFERENCED]
                    slab = _make_room(pool, group, full or _spare_slabs(pool, left[i], promised) > 0)
                page = pool.slabs[slab, FREE_PAGE]
                pool.slabs[slab, FREE_PAGE] = pool.pages[page, NEXT]
                pool.pages[page, REFS] = 1
                _count_reference(pool, group, slab, 1)
                _refile(pool, slab)
                pages[group, groups[group, TAKEN]] = page
                groups[group, TAKEN] += 1
                left[i, group] -= 1
    return left.shape[0]


@entry
def pin_pages(pool: PoolState, group: Int, pages: np.ndarray) -> None:
    """Add references; see `BlockPool.pin`."""
    for i in range(pages.shape[0]):
        page = np.int64(pages[i])
        pool.pages[page, REFS] += 1
        if pool.pages[page, REFS] == 1:
            slab = _slab_of(pool, group, page)
            _uncache(pool, group, slab, page)
            _count_reference(pool, group, slab, 1)
            _refile(pool, slab)


@entry
def release_pages(pool: PoolState, group: Int, pages: np.ndarray, warm: np.ndarray) -> None:
    """Drop references; see `BlockPool.release`."""
    pool.counts[CLOCK] += 1
    for i in range(pages.shape[0]):
        page = np.int64(pages[i])
        pool.pages[page, REFS] -= 1
        if pool.pages[page, REFS] > 0:
            continue
        slab = _slab_of(pool, group, page)
        _count_reference(pool, group, slab, -1)
        if pool.tags[page] == 0:
            _put_free(pool, slab, page)
        else:
            pool.slabs[slab, CACHED] += 1
            pool.groups[group, CACHED] += 1
            _link(pool.pages, PREV, page, pool.groups[group, WARM] if warm[i] else pool.groups[group, COLD])
            if warm[i]:
                pool.stamps[page] = pool.counts[CLOCK]
                pool.slabs[slab, NEWEST] = pool.counts[CLOCK]
        _refile(pool, slab)
