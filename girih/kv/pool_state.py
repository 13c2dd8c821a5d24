"""The pool's arrays, and how its slabs are lent and filed. Compiled; knows nothing of values, moves or requests.

Everything is a record of integers in a few arrays, and every list is a ring through such records: a column with the
previous record, the next column with the following one, and a head record that closes the ring.

    slab   free: in its stage class's ring of free slabs. Lent: in one ring by how many of its pages are referenced,
           those with a free page in front; while it has cached pages and no referenced one, also in the ring of idle
           slabs, oldest first
    page   cached: in one of its group's rings, see `eviction.py`; free: in its slab's chain by `NEXT`, or not touched
           since the slab was lent

Slabs and pages are numbered through over all stage classes and groups, from 1; 0 is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from girih.kv.compiled import inner

Int = int | np.integer

# columns of PoolState.pages; the last rows are the heads of the rings of cached pages
REFS, COLUMN, PREV, NEXT, HITS, RING, MARK = 0, 1, 2, 3, 4, 5, 6
# columns that slabs and groups have in common: pages that are referenced, cached, cached and worth something
REFERENCED, CACHED, WARM = 1, 2, 3
# columns of PoolState.slabs; the last rows are heads: free and idle slabs of each class, then every bucket
OWNER, FREE_PAGE, TOUCHED, USED, CLOSED, FILED, BUCKET, IDLE = 0, 4, 5, 6, 7, 8, 9, 11
# values of CLOSED: pages come and go; it is being emptied; it does not belong to the pool any more
OPEN, EMPTYING, RETIRED = 0, 1, 2
# columns of PoolState.groups; NEEDED_SLABS = ceil(referenced pages / pages per slab), ROOM: pages more until it grows
PAGES_PER_SLAB, SLABS, BUSY_SLABS, NEEDED_SLABS, ROOM, FULLEST = 0, 4, 5, 6, 7, 8
FIRST_PAGE, FIRST_SLAB, BUCKETS, BUCKET_SCALE, RINGS, STAGE_CLASS, PAGE_BYTES = 9, 10, 11, 12, 13, 14, 15
LEAVING = 16  # of the SLABS, those that are retired and not empty yet
SCALE = 17  # bytes of the largest page of the pool / PAGE_BYTES, times 1 << SCALE_BITS
# columns of PoolState.classes; NEEDED_SLABS (the sum over its groups) and FIRST_SLAB as above
NUM_SLABS, FREE_SLABS, FREE_HEAD, IDLE_HEAD, FIRST_GROUP, END_GROUP = 0, 1, 2, 3, 4, 5
# elements of PoolState.counts: records in `evicted` and `moves`, and the rules for moves
EVICTED, MOVES, MOVED_BYTES, MOVE_BUDGET_BYTES, MAX_SPARE_MOVES, MAX_MOVES = 0, 1, 2, 3, 4, 5

NUM_RINGS = 24
"""Rings of cached pages in each group: worth nothing, or a value of so many binary digits."""

MAX_BUCKETS = 64
"""Levels of fill by which the slabs of a group are filed, beside 0; exact up to so many pages per slab."""

SCALE_BITS = 8

_SCALE_BITS = 32


class PoolState(NamedTuple):
    """The arrays of one pool, as the compiled functions take them; the columns are named above.

    Args:
        pages: int32 [pages + 1 + NUM_RINGS * groups, 7]; references, block table column, links, hits, ring, and a mark
            of the caller's, 0 when a page is taken.
        tags: int32 [pages + 1, tags_per_page]; filled from column 0, 0 is none. A tagged page stays cached when its
            last reference goes.
        priorities: float64 [pages + 1]; of cached pages: the least goes first.
        slabs: int32 [slabs + 1 + heads, 13]; owner (-1: none), page counts, free pages, links.
        slab_priorities: float64 [slabs + 1]; the sum over a slab's warm pages.
        groups: int64 [groups, 18].
        ring_values: float64 [NUM_RINGS]; what a page of each ring is worth, per byte.
        ring_priorities: float64 [groups, NUM_RINGS]; of the oldest page of each ring, inf if there is none.
        ring_counts: int64 [groups, NUM_RINGS]; pages in each ring.
        classes: int64 [stage classes, 11].
        ages: float64 [stage classes]; the priority that eviction has reached.
        counts: int64 [6].
        evicted: int32 [n, 1 + tags_per_page]; evicted pages and the tags they had. Whoever takes pages drains it.
        moves: int32 [m, 3]; group, source page, destination page, one after the other.
    """

    pages: np.ndarray
    tags: np.ndarray
    priorities: np.ndarray
    slabs: np.ndarray
    slab_priorities: np.ndarray
    groups: np.ndarray
    ring_values: np.ndarray
    ring_priorities: np.ndarray
    ring_counts: np.ndarray
    classes: np.ndarray
    ages: np.ndarray
    counts: np.ndarray
    evicted: np.ndarray
    moves: np.ndarray


def make_pool_state(
    *,
    max_slabs: Sequence[int],
    class_of_group: Sequence[int],
    pages_per_slab: Sequence[int],
    page_bytes: Sequence[int],
    tags_per_page: int,
    move_budget_bytes: int,
) -> PoolState:
    """Make the arrays of a pool in which every slab is still retired; see `PagePool` for the arguments."""
    slabs_of_class, class_of, per_slab = (
        np.array(values, dtype=np.int64) for values in (max_slabs, class_of_group, pages_per_slab)
    )
    num_slabs, num_classes, num_groups = int(slabs_of_class.sum()), len(slabs_of_class), len(per_slab)
    pages_of = slabs_of_class[class_of] * per_slab
    num_pages = 1 + int(pages_of.sum())
    # the most pages there can be at once; sequences of takes move fewer, see `fits`
    most = int(sum(count * per_slab[class_of == c].max(initial=0) for c, count in enumerate(slabs_of_class)))
    levels = np.minimum(per_slab, MAX_BUCKETS)
    slab_heads = num_slabs + 1
    state = PoolState(
        pages=np.zeros((num_pages + NUM_RINGS * num_groups, 7), dtype=np.int32),
        tags=np.zeros((num_pages, tags_per_page), dtype=np.int32),
        priorities=np.zeros(num_pages),
        slabs=np.zeros((slab_heads + 2 * num_classes + int((levels + 1).sum()), 13), dtype=np.int32),
        slab_priorities=np.zeros(num_slabs + 1),
        groups=np.zeros((num_groups, 18), dtype=np.int64),
        ring_values=1.5 * 2.0 ** np.arange(-1, NUM_RINGS - 1) / max(page_bytes, default=1),
        ring_priorities=np.full((num_groups, NUM_RINGS), np.inf),
        ring_counts=np.zeros((num_groups, NUM_RINGS), dtype=np.int64),
        classes=np.zeros((num_classes, 11), dtype=np.int64),
        ages=np.zeros(num_classes),
        counts=np.array([0, 0, 0, move_budget_bytes, most, 2 * most], dtype=np.int64),
        evicted=np.zeros((most, 1 + tags_per_page), dtype=np.int32),
        moves=np.zeros((4 * most, 3), dtype=np.int32),
    )
    classes, groups = state.classes, state.groups
    classes[:, FIRST_SLAB] = 1 + np.cumsum(slabs_of_class) - slabs_of_class
    classes[:, FREE_HEAD] = slab_heads + 2 * np.arange(num_classes)
    classes[:, IDLE_HEAD] = classes[:, FREE_HEAD] + 1
    classes[:, FIRST_GROUP] = np.searchsorted(class_of, np.arange(num_classes))
    classes[:, END_GROUP] = np.searchsorted(class_of, np.arange(num_classes), side="right")
    groups[:, PAGES_PER_SLAB], groups[:, STAGE_CLASS], groups[:, PAGE_BYTES] = per_slab, class_of, page_bytes
    groups[:, FIRST_PAGE] = 1 + np.cumsum(pages_of) - pages_of
    groups[:, FIRST_SLAB] = classes[class_of, FIRST_SLAB]
    groups[:, BUCKETS] = slab_heads + 2 * num_classes + np.cumsum(levels + 1) - (levels + 1)
    groups[:, BUCKET_SCALE] = (levels << _SCALE_BITS) // np.maximum(per_slab, 1)
    groups[:, RINGS] = num_pages + NUM_RINGS * np.arange(num_groups)
    state.ring_values[0] = 0
    bytes_of = groups[:, PAGE_BYTES]
    groups[:, SCALE] = ((bytes_of.max(initial=1) << SCALE_BITS) + bytes_of // 2) // bytes_of
    heads = np.arange(num_pages, len(state.pages))
    state.pages[heads, PREV] = state.pages[heads, NEXT] = heads
    heads = np.arange(slab_heads, len(state.slabs))
    for column in (BUCKET, BUCKET + 1, IDLE, IDLE + 1):
        state.slabs[heads, column] = heads
    state.slabs[1:slab_heads, OWNER], state.slabs[1:slab_heads, CLOSED] = -1, RETIRED
    return state


@inner
def link(nodes: np.ndarray, column: Int, node: Int, before: Int) -> None:
    """Put a record into a ring, before another one; before the head is the end."""
    previous = nodes[before, column]
    nodes[previous, column + 1] = node
    nodes[node, column] = previous
    nodes[node, column + 1] = before
    nodes[before, column] = node


@inner
def unlink(nodes: np.ndarray, column: Int, node: Int) -> None:
    """Take a record out of its ring; its previous one is then 0: it is in no ring."""
    previous, following = nodes[node, column], nodes[node, column + 1]
    nodes[previous, column + 1] = following
    nodes[following, column] = previous
    nodes[node, column] = 0
    nodes[node, column + 1] = 0


@inner
def slab_of(pool: PoolState, group: Int, page: Int) -> Int:
    """Return the slab that holds a page of a group."""
    return (page - pool.groups[group, FIRST_PAGE]) // pool.groups[group, PAGES_PER_SLAB] + pool.groups[
        group, FIRST_SLAB
    ]


@inner
def first_page_of(pool: PoolState, group: Int, slab: Int) -> Int:
    """Return the first page of a slab that a group has borrowed."""
    groups = pool.groups
    return groups[group, FIRST_PAGE] + (slab - groups[group, FIRST_SLAB]) * groups[group, PAGES_PER_SLAB]


@inner
def _bucket_of(pool: PoolState, group: Int, referenced: Int) -> Int:
    # 0 for 0 pages, the last one for all of them, and exact up to MAX_BUCKETS pages per slab
    scale = pool.groups[group, BUCKET_SCALE]
    return pool.groups[group, BUCKETS] + ((referenced * scale + (1 << _SCALE_BITS) - 1) >> _SCALE_BITS)


@inner
def _give_back(pool: PoolState, slab: Int) -> None:
    # the last page of a slab is free: it belongs to all groups again, unless it was retired
    slabs, group = pool.slabs, np.int64(pool.slabs[slab, OWNER])
    slabs[slab, OWNER] = -1
    pool.slab_priorities[slab] = 0.0
    pool.groups[group, SLABS] -= 1
    if slabs[slab, CLOSED] == RETIRED:
        pool.groups[group, LEAVING] -= 1
    else:
        record = pool.classes[pool.groups[group, STAGE_CLASS]]
        slabs[slab, CLOSED] = OPEN
        record[FREE_SLABS] += 1
        link(slabs, BUCKET, slab, slabs[record[FREE_HEAD], BUCKET + 1])


@inner
def refile(pool: PoolState, group: Int, slab: Int) -> None:
    """Put a slab of a group whose counts changed where it belongs: its bucket, the idle ones, the free ones."""
    slabs = pool.slabs
    referenced, cached = np.int64(slabs[slab, REFERENCED]), np.int64(slabs[slab, CACHED])
    filed = np.int64(0)
    if referenced + cached != 0 and slabs[slab, CLOSED] == OPEN:
        filed = _bucket_of(pool, group, referenced)
        if referenced + cached == pool.groups[group, PAGES_PER_SLAB]:
            filed = -filed
    if filed != slabs[slab, FILED]:
        if slabs[slab, FILED] != 0:
            unlink(slabs, BUCKET, slab)
        slabs[slab, FILED] = filed
        if filed > 0:
            link(slabs, BUCKET, slab, slabs[filed, BUCKET + 1])
            pool.groups[group, FULLEST] = max(pool.groups[group, FULLEST], filed)
        elif filed < 0:
            link(slabs, BUCKET, slab, -filed)
    idle = referenced == 0 and filed != 0
    if idle != (slabs[slab, IDLE] != 0):
        if idle:
            link(slabs, IDLE, slab, pool.classes[pool.groups[group, STAGE_CLASS], IDLE_HEAD])
        else:
            unlink(slabs, IDLE, slab)
    if referenced + cached == 0:
        _give_back(pool, slab)


@inner
def fullest_slab(pool: PoolState, group: Int) -> Int:
    """Return the slab of a group with a free page that has the most referenced ones, or 0."""
    record, slabs = pool.groups[group], pool.slabs
    found = np.int64(0)
    head = record[FULLEST]
    if record[SLABS] * record[PAGES_PER_SLAB] == record[REFERENCED] + record[CACHED]:
        head = np.int64(0)
    while head >= record[BUCKETS]:
        slab = np.int64(slabs[head, BUCKET + 1])
        if slab != head and slabs[slab, FILED] > 0:
            found = slab
            break
        head -= 1
    record[FULLEST] = head
    return found


@inner
def emptiest_slab(pool: PoolState, group: Int) -> Int:
    """Return a slab of a group with the fewest referenced pages, but some, or 0."""
    head = pool.groups[group, BUCKETS] + 1
    last = _bucket_of(pool, group, pool.groups[group, PAGES_PER_SLAB])
    while head < last and pool.slabs[head, BUCKET + 1] == head:
        head += 1
    slab = np.int64(pool.slabs[head, BUCKET + 1])
    return slab if slab != head else np.int64(0)


@inner
def lend(pool: PoolState, group: Int) -> None:
    """Give a group one of the free slabs, of which there is one; it stands open and unfiled until a page is taken."""
    record, slabs = pool.classes[pool.groups[group, STAGE_CLASS]], pool.slabs
    slab = np.int64(slabs[record[FREE_HEAD], BUCKET + 1])
    unlink(slabs, BUCKET, slab)
    record[FREE_SLABS] -= 1
    pool.groups[group, SLABS] += 1
    slabs[slab, OWNER] = group
    slabs[slab, FREE_PAGE] = slabs[slab, TOUCHED] = 0
    slabs[slab, USED] = 1
    filed = pool.groups[group, BUCKETS]
    slabs[slab, FILED] = filed
    link(slabs, BUCKET, slab, slabs[filed, BUCKET + 1])
    pool.groups[group, FULLEST] = max(pool.groups[group, FULLEST], filed)


@inner
def pop_free(pool: PoolState, group: Int, slab: Int) -> Int:
    """Take a free page out of a slab that has one."""
    page = np.int64(pool.slabs[slab, FREE_PAGE])
    if page != 0:
        pool.slabs[slab, FREE_PAGE] = pool.pages[page, NEXT]
        return page
    page = first_page_of(pool, group, slab) + pool.slabs[slab, TOUCHED]
    pool.slabs[slab, TOUCHED] += 1
    return page


@inner
def put_free(pool: PoolState, slab: Int, page: Int) -> None:
    """Put a page among the free ones of its slab."""
    pool.pages[page, NEXT] = pool.slabs[slab, FREE_PAGE]
    pool.slabs[slab, FREE_PAGE] = page


@inner
def count_reference(pool: PoolState, group: Int, slab: Int, change: Int) -> None:
    """Count that a page of a slab became referenced (change = 1) or lost its last reference (-1)."""
    record = pool.groups[group]
    record[REFERENCED] += change
    record[ROOM] -= change
    if record[ROOM] < 0 or record[ROOM] == record[PAGES_PER_SLAB]:
        record[NEEDED_SLABS] += change
        pool.classes[record[STAGE_CLASS], NEEDED_SLABS] += change
        record[ROOM] += change * record[PAGES_PER_SLAB]
    record[BUSY_SLABS] -= pool.slabs[slab, REFERENCED] > 0
    pool.slabs[slab, REFERENCED] += change
    record[BUSY_SLABS] += pool.slabs[slab, REFERENCED] > 0
