"""What must always hold between pool, tables and index; `KVCacheManager.check` runs it in tests and debug runs."""

from __future__ import annotations

import numpy as np

from girih.kv import state as s
from girih.kv.page_pool import PagePool
from girih.kv.pool_check import check_pool
from girih.kv.pool_state import FIRST_PAGE, REFS
from girih.kv.state import ManagerState


def check_state(state: ManagerState, pool: PagePool) -> None:
    """Raise AssertionError that names the broken invariant.

    Args:
        state: the manager's arrays.
        pool: their pages.
    """
    rows = state.rows
    # a step under way may compute the token that the one before it samples
    assert (rows[:, s.KNOWN] + 1 >= rows[:, s.COMPUTED]).all(), "a row computed unknown tokens"
    assert (rows[:, s.PUBLISHED] <= rows[:, s.HASHED]).all(), "a row listed a unit without a key"
    check_pool(pool, [_count_references(state, group) for group in range(len(state.groups))])
    _check_index(state)


def _count_references(state: ManagerState, group: int) -> np.ndarray:
    """Count the cells that hold each page of a group, int [pages of the group].

    Raises:
        AssertionError: a live column is empty or another one is not, a row holds a page twice, a row without a request
            holds one, or a page belongs to another group.
    """
    facts, num_rows = state.groups[group], len(state.rows)
    width, columns = int(facts[s.WIDTH]), int(facts[s.COLUMNS])
    table = state.table[facts[s.TABLE] : facts[s.TABLE] + num_rows * columns].reshape(num_rows, columns)
    first, last = state.spans[group, :, s.FIRST], state.spans[group, :, s.LAST]
    assert ((first >= 0) & (first <= last) & (last <= width)).all(), f"columns of group {group}"
    held = state.rows[:, s.HELD] > 0
    assert not table[~held].any(), f"a row of group {group} holds a page without a request"
    number = np.arange(width)
    live = (number >= first[:, None]) & (number < last[:, None])
    assert np.array_equal(table[:, :width] > 0, live), f"pages and live columns differ in group {group}"
    cuts = table[:, width + 1 :] > 0
    assert np.array_equal(cuts, (state.cuts > 0)[:, : cuts.shape[1]]), f"cuts without a page in group {group}"
    at_row, _ = np.nonzero(table)
    pages = table[table > 0].astype(np.int64)
    owned = at_row * (1 + pages.max(initial=0)) + pages
    assert len(np.unique(owned)) == len(owned), f"a row of group {group} holds a page twice"
    starts = state.pool.groups[:, FIRST_PAGE]
    end = starts[group + 1] if group + 1 < len(starts) else len(state.pool.tags)
    assert ((pages >= starts[group]) & (pages < end)).all(), f"a table of group {group} holds another group's page"
    return np.bincount(pages - starts[group], minlength=int(end - starts[group]))


def _check_index(state: ManagerState) -> None:
    slots, keys, pages, _, free, counts = state.prefix_index
    tags = state.pool.tags
    entries = np.sort(slots[slots > 0])
    assert len(np.unique(entries)) == len(entries), "an entry is in two slots"
    assert len(entries) == len(free) - counts[0], "slots and free entries do not add up"
    assert not np.isin(entries, free[: counts[0]]).any(), "an entry is both in a slot and free"
    assert (pages[entries] > 0).any(axis=1).all(), "an entry has no page"
    assert np.count_nonzero(pages) == np.count_nonzero(pages[entries]), "a free entry has a page"
    assert len(np.unique(keys[entries], axis=0)) == len(entries), "a key has two entries"
    listed = [(int(entry), int(page)) for entry in entries for page in pages[entry] if page]
    tagged = [(int(entry), int(page)) for page, row in enumerate(tags) for entry in row if entry]
    assert sorted(listed) == sorted(tagged), "listed pages and tagged pages differ"
    gaps = (tags[:, 1:] > 0) & (tags[:, :-1] == 0)
    assert not gaps.any(), "tags have a gap"
    assert len(state.holders) == len(tags) == len(state.pool.pages[: len(tags), REFS]), "arrays of pages differ"
