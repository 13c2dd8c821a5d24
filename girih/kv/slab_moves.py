"""Pages change place so that slabs get empty: room for another group, or a smaller pool. Compiled.

    slab 3 of group h   [ .  a  .  . ]                       slab 3: lent to group g
    slab 5 of group h   [ b  c  .  d ]   -- a moves -->      slab 5 of group h   [ b  c  a  d ]

What is referenced needs only sum over groups of ceil(referenced pages / pages per slab) slabs. As long as the pool has
as many, one can always be emptied: if no slab is free or idle, and a group has no page left to hand out, then all its
slabs are full of referenced pages, and some other group has a slab more than its referenced pages need.

A slab is emptied also where cached pages could still be evicted instead, if that saves what is worth more: a group
whose requests fill all its slabs would else keep cached pages that are worth little, while others evict good ones.

A move takes everything along that the pool knows of a page: references, tags, table column, hits, mark, its place in a
ring. It is noted in `pool.moves` for the workers, to be done one after the other, and for whoever keeps page numbers.
"""

from __future__ import annotations

import numpy as np

from girih.kv.compiled import entry, inner
from girih.kv.eviction import cheapest_page, cheapest_victim, count_cached, evict, evict_victim
from girih.kv.pool_state import (
    BUCKET,
    CACHED,
    CLOSED,
    COLUMN,
    EMPTYING,
    END_GROUP,
    FIRST_GROUP,
    FIRST_SLAB,
    FREE_HEAD,
    FREE_SLABS,
    HITS,
    LEAVING,
    MARK,
    MAX_SPARE_MOVES,
    MOVE_BUDGET_BYTES,
    MOVED_BYTES,
    MOVES,
    NEEDED_SLABS,
    NEXT,
    NUM_SLABS,
    OPEN,
    OWNER,
    PAGE_BYTES,
    PAGES_PER_SLAB,
    PREV,
    REFERENCED,
    REFS,
    RETIRED,
    RING,
    SLABS,
    STAGE_CLASS,
    TOUCHED,
    Int,
    PoolState,
    count_reference,
    emptiest_slab,
    first_page_of,
    fullest_slab,
    lend,
    link,
    pop_free,
    put_free,
    refile,
    unlink,
)


@inner
def _move(pool: PoolState, group: Int, page: Int, source: Int, target: Int) -> None:
    # move a page from slab `source` to a free page of slab `target`
    pages, place = pool.pages, pop_free(pool, group, target)
    pages[place, REFS], pages[page, REFS] = pages[page, REFS], 0
    pages[place, COLUMN] = pages[page, COLUMN]
    pages[place, HITS] = pages[page, HITS]
    pages[place, RING] = pages[page, RING]
    pages[place, MARK] = pages[page, MARK]
    pool.priorities[place] = pool.priorities[page]
    for tag in range(pool.tags.shape[1]):
        pool.tags[place, tag], pool.tags[page, tag] = pool.tags[page, tag], 0
    if pages[place, REFS] > 0:
        count_reference(pool, group, source, -1)
        count_reference(pool, group, target, 1)
    else:
        previous, following = pages[page, PREV], pages[page, NEXT]
        pages[place, PREV], pages[place, NEXT] = previous, following
        pages[previous, NEXT] = pages[following, PREV] = place
        pages[page, PREV] = 0
        count_cached(pool, group, source, page, -1)
        count_cached(pool, group, target, place, 1)
    put_free(pool, source, page)
    count = pool.counts[MOVES]
    pool.moves[count, 0], pool.moves[count, 1], pool.moves[count, 2] = group, page, place
    pool.counts[MOVES] = count + 1
    refile(pool, group, target)
    refile(pool, group, source)


@inner
def _may_move_cached(pool: PoolState, group: Int) -> bool | np.bool:
    counts = pool.counts
    moved = counts[MOVED_BYTES] + pool.groups[group, PAGE_BYTES]
    return moved <= counts[MOVE_BUDGET_BYTES] and counts[MOVES] < counts[MAX_SPARE_MOVES]


@inner
def _empty(pool: PoolState, group: Int, slab: Int) -> None:
    # move a slab's pages into other slabs of its group, where its referenced pages find room
    pool.slabs[slab, CLOSED] = EMPTYING
    refile(pool, group, slab)
    first = first_page_of(pool, group, slab)
    last = first + pool.slabs[slab, TOUCHED]
    for page in range(first, last):
        while pool.pages[page, REFS] > 0:
            target = fullest_slab(pool, group)
            if target != 0:
                _move(pool, group, page, slab, target)
            else:
                _find_room(pool, group)
    for page in range(first, last):
        while pool.pages[page, PREV] != 0:
            target = fullest_slab(pool, group)
            if not _may_move_cached(pool, group) or (target == 0 and not _is_worth_a_move(pool, group, page)):
                evict(pool, group, page)
            elif target != 0:
                pool.counts[MOVED_BYTES] += pool.groups[group, PAGE_BYTES]
                _move(pool, group, page, slab, target)
            else:
                _find_room(pool, group)


@inner
def _is_worth_a_move(pool: PoolState, group: Int, page: Int) -> bool | np.bool:
    # whether a cached page has clearly more value left than the one that would be evicted for it
    age = pool.ages[pool.groups[group, STAGE_CLASS]]
    return pool.priorities[page] - age > 2 * max(0.0, pool.priorities[cheapest_page(pool, group)] - age)


@inner
def _find_room(pool: PoolState, group: Int) -> None:
    # a page that was alone in its slab leaves a free slab behind, which the group can have back
    if pool.classes[pool.groups[group, STAGE_CLASS], FREE_SLABS] > 0:
        lend(pool, group)
    else:
        evict(pool, group, cheapest_page(pool, group))


@inner
def _loss(pool: PoolState, group: Int) -> float | np.floating:
    # no page has a higher priority that a group must evict to live with a slab less; free pages count first
    record, ring = pool.groups[group], np.int64(0)
    more = record[REFERENCED] + record[CACHED] - (record[SLABS] - record[LEAVING] - 1) * record[PAGES_PER_SLAB]
    while more > pool.ring_counts[group, ring]:
        more -= pool.ring_counts[group, ring]
        ring += 1
    return pool.ages[record[STAGE_CLASS]] + pool.ring_values[ring]


@inner
def _may_empty(pool: PoolState, group: Int, slab: Int, price: float | np.floating) -> bool | np.bool:
    # whether to move a whole slab for pages that could be had for `price`
    age, slabs = pool.ages[pool.groups[group, STAGE_CLASS]], pool.slabs
    moved_bytes = (slabs[slab, REFERENCED] + slabs[slab, CACHED]) * pool.groups[group, PAGE_BYTES]
    return (
        _loss(pool, group) - age < (price - age) / 2
        and pool.counts[MOVED_BYTES] + moved_bytes <= pool.counts[MOVE_BUDGET_BYTES]
    )


@inner
def _empty_a_slab(pool: PoolState, taker: Int, price: float | np.floating) -> bool | np.bool:
    """Empty a slab of the group that has more than its referenced pages need and the fewest bytes to move.

    Args:
        pool: the pool.
        taker: the group that needs the slab.
        price: what other room costs; inf if there is none. Else only a group will do of which a slab full of pages is
            worth less than half of that, if the budget for moves allows.

    Returns:
        False, with nothing done, if there is no such group.
    """
    groups, donor, chosen, least = pool.groups, np.int64(0), np.int64(0), np.int64(0)
    stage_class = groups[taker, STAGE_CLASS]
    for group in range(pool.classes[stage_class, FIRST_GROUP], pool.classes[stage_class, END_GROUP]):
        if group == taker or groups[group, SLABS] - groups[group, LEAVING] <= groups[group, NEEDED_SLABS]:
            continue
        slab = emptiest_slab(pool, group)
        moved_bytes = pool.slabs[slab, REFERENCED] * groups[group, PAGE_BYTES]
        if slab == 0 or not (price == np.inf or _may_empty(pool, group, slab, price)):
            continue
        if chosen == 0 or moved_bytes < least:
            donor, chosen, least = np.int64(group), slab, moved_bytes
    if chosen == 0:
        return False
    if price < np.inf:
        pool.counts[MOVED_BYTES] += least
        first = pool.priorities[cheapest_page(pool, donor)]
        pool.ages[stage_class] = max(pool.ages[stage_class], min(first, price))
    _empty(pool, donor, chosen)
    return True


@inner
def slab_with_room(pool: PoolState, group: Int) -> Int:
    """Return a slab of a group with a free page, made by evicting and moving if there is none.

    Returns:
        0 if every page that the group could have is referenced; never if `fits` said that one more fits.
    """
    slab = fullest_slab(pool, group)
    return slab if slab != 0 else _make_room(pool, group)


@inner
def _make_room(pool: PoolState, group: Int) -> Int:
    stage_class, slab = pool.groups[group, STAGE_CLASS], np.int64(0)
    while slab == 0:
        if pool.classes[stage_class, FREE_SLABS] > 0:
            lend(pool, group)
        else:
            price, victim = cheapest_victim(pool, group)
            if not _empty_a_slab(pool, group, price):
                if price == np.inf:
                    break
                evict_victim(pool, group, price, victim)
        slab = fullest_slab(pool, group)
    return slab


@entry
def add_slabs(pool: PoolState, stage_class: Int, num_slabs: Int) -> None:
    """Let a stage class have so many slabs, if it has fewer."""
    record = pool.classes[stage_class]
    for slab in range(record[FIRST_SLAB] + num_slabs - 1, record[FIRST_SLAB] + record[NUM_SLABS] - 1, -1):
        pool.slabs[slab, CLOSED] = OPEN
        record[FREE_SLABS] += 1
        link(pool.slabs, BUCKET, slab, pool.slabs[record[FREE_HEAD], BUCKET + 1])
    record[NUM_SLABS] = max(record[NUM_SLABS], num_slabs)


@entry
def remove_last_slab(pool: PoolState, stage_class: Int) -> None:
    """Empty the last slab of a stage class and take it away; the caller has checked that the others hold the rest."""
    record = pool.classes[stage_class]
    record[NUM_SLABS] -= 1
    slab = record[FIRST_SLAB] + record[NUM_SLABS]
    group = np.int64(pool.slabs[slab, OWNER])
    pool.slabs[slab, CLOSED] = RETIRED
    if group < 0:
        record[FREE_SLABS] -= 1
        unlink(pool.slabs, BUCKET, slab)
        return
    pool.groups[group, LEAVING] += 1
    refile(pool, group, slab)
    first = first_page_of(pool, group, slab)
    last = first + pool.slabs[slab, TOUCHED]
    for page in range(first, last):  # what must stay comes first: it may evict what comes next
        if pool.pages[page, REFS] > 0:
            _move(pool, group, page, slab, slab_with_room(pool, group))
    for page in range(first, last):
        if pool.pages[page, PREV] != 0:
            target = fullest_slab(pool, group)
            if target == 0 and record[FREE_SLABS] > 0:
                lend(pool, group)
                target = fullest_slab(pool, group)
            if target == 0:
                evict(pool, group, page)
            else:
                _move(pool, group, page, slab, target)
