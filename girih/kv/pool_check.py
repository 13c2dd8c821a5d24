"""What must always hold in the pool: every count, ring, owner and price agrees with the states of its pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from girih.kv import pool_state as s
from girih.kv.page_pool import PagePool

__all__ = ["check_pool"]


def check_pool(pool: PagePool, references: Sequence[np.ndarray]) -> None:
    """Raise AssertionError that names what is wrong; slow, for tests and debug runs.

    Args:
        pool: the pool.
        references: per group, int [pages of the group]; how often each page is referenced.
    """
    state = pool.state
    for stage_class, record in enumerate(state.classes):
        groups = range(record[s.FIRST_GROUP], record[s.END_GROUP])
        most = pool.max_slabs[stage_class]
        slabs = state.slabs[record[s.FIRST_SLAB] :][:most]
        owner = slabs[:, s.OWNER]
        closed = np.arange(most) >= record[s.NUM_SLABS]
        assert np.array_equal(slabs[:, s.CLOSED], np.where(closed, s.RETIRED, s.OPEN)), "wrong slabs are closed"
        assert (owner[closed] == -1).all(), "a retired slab has an owner"
        assert np.isin(owner, [-1, *groups]).all(), f"a slab of class {stage_class} belongs to another class"
        free = (owner == -1) & ~closed
        assert record[s.FREE_SLABS] == np.count_nonzero(free), "free slabs are miscounted"
        listed = _walk(state.slabs, s.BUCKET, record[s.FREE_HEAD])
        assert sorted(listed) == _numbers(free, record[s.FIRST_SLAB]), "wrong ring of free slabs"
        idle = np.zeros(most, dtype=bool)
        for group in groups:
            idle |= _check_group(pool, group, references[group])
        listed = _walk(state.slabs, s.IDLE, record[s.IDLE_HEAD])
        assert sorted(listed) == _numbers(idle, record[s.FIRST_SLAB]), "wrong ring of idle slabs"
        needed = state.groups[groups.start : groups.stop, s.NEEDED_SLABS].sum()
        assert record[s.NEEDED_SLABS] == needed <= record[s.NUM_SLABS], f"more is referenced in {stage_class} than fits"


def _check_group(pool: PagePool, group: int, expected: np.ndarray) -> np.ndarray:
    # returns the group's idle slabs, bool [slabs there can be]
    state, record = pool.state, pool.state.groups[group]
    first, per_slab = int(record[s.FIRST_PAGE]), int(record[s.PAGES_PER_SLAB])
    mine = slice(first, first + len(expected))
    refs, tagged = state.pages[mine, s.REFS], state.tags[mine, 0] > 0
    assert len(expected) == per_slab * pool.max_slabs[record[s.STAGE_CLASS]], f"number of pages of group {group}"
    assert np.array_equal(refs, expected), f"references of group {group} differ from those who hold them"
    cached = tagged & (refs == 0)
    _check_rings(pool, group, first + np.flatnonzero(cached))
    warm = cached & (state.pages[mine, s.RING] > 0)

    slabs = state.slabs[record[s.FIRST_SLAB] :][: len(expected) // per_slab]
    owned = slabs[:, s.OWNER] == group
    counted = [(pages.reshape(-1, per_slab)).sum(axis=1) for pages in (refs > 0, cached, warm)]
    assert np.array_equal(owned, counted[0] + counted[1] > 0), f"group {group} owns the wrong slabs"
    columns = [s.REFERENCED, s.CACHED, s.WARM]
    assert np.array_equal(slabs[owned][:, columns], np.stack(counted, axis=1)[owned]), f"pages per slab of {group}"
    totals = [sum(counts) for counts in counted]
    assert record[columns].tolist() == totals, f"pages of group {group}"
    assert record[s.SLABS] == np.count_nonzero(owned), f"slabs of group {group}"
    assert record[s.BUSY_SLABS] == np.count_nonzero(counted[0]), f"busy slabs of group {group}"
    assert record[s.NEEDED_SLABS] == -(-totals[0] // per_slab), f"slabs that group {group} needs"
    assert record[s.ROOM] == record[s.NEEDED_SLABS] * per_slab - totals[0], f"room of group {group}"
    assert record[s.LEAVING] == 0, f"group {group} has slabs that are retired"
    priorities = np.where(warm, state.priorities[mine], 0).reshape(-1, per_slab).sum(axis=1)
    sums = state.slab_priorities[record[s.FIRST_SLAB] :][: len(slabs)]
    assert np.allclose(sums[owned], priorities[owned], rtol=1e-6, atol=1e-9), f"priorities of the slabs of {group}"
    _check_buckets(pool, group, owned, (refs == 0) & ~cached)
    return owned & (counted[0] == 0)


def _check_rings(pool: PagePool, group: int, cached: np.ndarray) -> None:
    state, listed = pool.state, []
    for ring in range(s.NUM_RINGS):
        pages = _walk(state.pages, s.PREV, state.groups[group, s.RINGS] + ring)
        assert state.ring_counts[group, ring] == len(pages), f"pages in ring {ring} of group {group}"
        least = state.priorities[pages[0]] if pages else np.inf
        assert state.ring_priorities[group, ring] == least, f"least priority of ring {ring} of group {group}"
        if pages:
            assert (state.pages[pages, s.RING] == ring).all(), f"a page of group {group} is in the wrong ring"
            assert (np.diff(state.priorities[pages]) >= 0).all(), f"ring {ring} of group {group} is out of order"
        listed += pages
    assert sorted(listed) == cached.tolist(), f"wrong rings of cached pages in group {group}"


def _check_buckets(pool: PagePool, group: int, owned: np.ndarray, free: np.ndarray) -> None:
    # owned: bool [slabs]; free: bool [pages of the group]
    state, record = pool.state, pool.state.groups[group]
    per_slab, first_slab = int(record[s.PAGES_PER_SLAB]), int(record[s.FIRST_SLAB])
    free = free.reshape(-1, per_slab)
    levels, found = min(per_slab, s.MAX_BUCKETS), []
    for level in range(levels + 1):
        listed = _walk(state.slabs, s.BUCKET, record[s.BUCKETS] + level)
        if not listed:
            continue
        found += listed
        slabs = np.array(listed)
        exact = state.slabs[slabs, s.REFERENCED] * levels / per_slab
        assert (np.abs(np.ceil(exact) - level) <= (per_slab > levels)).all(), f"bucket {level} of group {group}"
        has_free = free[slabs - first_slab].any(axis=1)
        assert (np.diff(has_free.astype(int)) <= 0).all(), f"a full slab of group {group} is before one with free pages"
        assert not has_free.any() or record[s.FULLEST] >= record[s.BUCKETS] + level, f"fullest slab of group {group}"
    assert sorted(found) == _numbers(owned, first_slab), f"wrong buckets of group {group}"
    for slab in np.flatnonzero(owned):
        start = int(record[s.FIRST_PAGE]) + int(slab) * per_slab
        chain: list[int] = []
        touched, page = (int(state.slabs[first_slab + slab, column]) for column in (s.TOUCHED, s.FREE_PAGE))
        while page:
            assert len(chain) < per_slab, f"the free pages of slab {slab} run in circles"
            chain.append(page)
            page = int(state.pages[page, s.NEXT])
        right = (start + np.flatnonzero(free[slab])).tolist()
        assert [*sorted(chain), *range(start + touched, start + per_slab)] == right, f"free pages of slab {slab}"


def _numbers(which: np.ndarray, first: int) -> list[int]:
    return (np.flatnonzero(which) + int(first)).tolist()


def _walk(nodes: np.ndarray, column: int, head: int) -> list[int]:
    found: list[int] = []
    node = int(nodes[head, column + 1])
    while node != head:
        assert len(found) < len(nodes), "a ring does not close"
        found.append(node)
        node = int(nodes[node, column + 1])
    return found
