"""What must always hold in the pool and the block tables; `KVCacheManager.check` runs it in tests and debug runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from girih.kv import slabs as s
from girih.kv.block_pool import BlockPool
from girih.kv.block_tables import BlockTables


def check_pool(pool: BlockPool, references: Sequence[np.ndarray]) -> None:
    """Raise AssertionError unless every count, list and owner of a pool agrees with the states of its pages.

    Args:
        pool: the pool.
        references: per group, int [pages of the group]; how many block tables hold each page.
    """
    slabs, counts = pool.state.slabs, pool.state.counts
    owner = slabs[1 : pool.num_slabs + 1, s.OWNER]
    assert counts[s.FREE_SLABS] == np.count_nonzero(owner < 0), "free slabs are miscounted"
    assert sorted(_walk(slabs, s.BUCKET, counts[s.FREE_HEAD])) == _numbers(owner < 0), "wrong list of free slabs"
    idle = np.zeros(pool.num_slabs, dtype=bool)
    for group, expected in enumerate(references):
        idle |= _check_group(pool, group, expected)
    assert sorted(_walk(slabs, s.IDLE, counts[s.IDLE_HEAD])) == _numbers(idle), "wrong list of idle slabs"


def count_references(tables: BlockTables, held: np.ndarray) -> list[np.ndarray]:
    """Count, per group, how many rows hold each page.

    Args:
        tables: the block tables.
        held: bool [rows]; which rows belong to a request.

    Raises:
        AssertionError: an entry outside the live columns is not null or one inside is, a row holds a page twice, or
            a row without a request has an entry.
    """
    counted = []
    for group, (table, null_id) in enumerate(zip(tables.tables, tables.null_ids, strict=True)):
        first, last = tables.first[group], tables.last[group]
        assert ((first >= 0) & (first <= last) & (last <= table.shape[1])).all(), f"columns of group {group}"
        columns = np.arange(table.shape[1])
        live = (columns >= first[:, None]) & (columns < last[:, None])
        assert not live[~held].any(), f"a row of group {group} is live without a request"
        assert np.array_equal(table != null_id, live), f"null entries and live columns differ in group {group}"
        rows = np.nonzero(live)[0].astype(np.int64)
        owned = rows * (null_id + 1) + table[live]
        assert len(np.unique(owned)) == len(owned), f"a row of group {group} holds a page twice"
        counted.append(np.bincount(table[live], minlength=null_id))
    return counted


def _check_group(pool: BlockPool, group: int, expected: np.ndarray) -> np.ndarray:
    # returns the group's idle slabs, bool [num_slabs]
    state, record = pool.state, pool.state.groups[group]
    per_slab, first = int(record[s.PAGES_PER_SLAB]), int(record[s.FIRST_PAGE])
    refs = state.pages[first : first + len(expected), s.REFS]
    assert (refs >= 0).all(), f"negative references in group {group}"
    assert np.array_equal(refs, expected), f"references and block tables differ in group {group}"
    cached = (state.tags[first : first + len(expected)] > 0) & (refs == 0)
    listed = _walk(state.pages, s.PREV, record[s.COLD]) + _walk(state.pages, s.PREV, record[s.WARM])
    assert sorted(listed) == (first + np.flatnonzero(cached)).tolist(), f"wrong lists of cached pages in group {group}"

    mine = state.slabs[1 : pool.num_slabs + 1, s.OWNER] == group
    num_referenced = (refs > 0).reshape(-1, per_slab).sum(axis=1)
    num_cached = cached.reshape(-1, per_slab).sum(axis=1)
    assert np.array_equal(mine, num_referenced + num_cached > 0), f"group {group} owns the wrong slabs"
    own = state.slabs[1 : pool.num_slabs + 1][mine]
    assert np.array_equal(own[:, s.REFERENCED], num_referenced[mine]), f"referenced pages per slab of group {group}"
    assert np.array_equal(own[:, s.CACHED], num_cached[mine]), f"cached pages per slab of group {group}"
    totals = [num_referenced.sum(), num_cached.sum(), mine.sum(), np.count_nonzero(num_referenced)]
    columns = [s.REFERENCED, s.CACHED, s.SLABS, s.BUSY_SLABS]
    assert record[columns].tolist() == totals, f"totals of group {group}"

    free = (~cached & (refs == 0)).reshape(-1, per_slab)
    filed = [[*_walk(state.slabs, s.BUCKET, record[s.BUCKETS] + fill)] for fill in range(per_slab)]
    right = [_numbers(mine & free.any(axis=1) & (num_referenced == fill)) for fill in range(per_slab)]
    assert [sorted(slabs) for slabs in filed] == right, f"wrong buckets of group {group}"
    for slab in np.flatnonzero(mine):
        chain, page = [], int(state.slabs[slab + 1, s.FREE_PAGE])
        for _ in range(int(free[slab].sum())):
            chain.append(page)
            page = int(state.pages[page, s.NEXT])
        right = (first + slab * per_slab + np.flatnonzero(free[slab])).tolist()
        assert sorted(chain) == right, f"wrong free pages in slab {slab} of group {group}"
    return mine & (num_referenced == 0)


def _numbers(which: np.ndarray) -> list[int]:
    return (np.flatnonzero(which) + 1).tolist()


def _walk(nodes: np.ndarray, column: int, head: int) -> list[int]:
    found: list[int] = []
    node = int(nodes[head, column + 1])
    while node != head:
        assert len(found) < len(nodes), "a list runs in circles"
        found.append(node)
        node = int(nodes[node, column + 1])
    return found
