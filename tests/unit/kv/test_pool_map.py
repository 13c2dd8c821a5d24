"""The map of the pool, against a count of every table's cells and against what the toy memory has in every page."""

import pickle

import numpy as np
import pytest
from kv_driver import KVDriver, make_config

from girih.errors import RequestError
from girih.kv.pool_map import CACHED, FREE, NOBODY
from girih.kv.pool_state import FIRST_PAGE
from girih.kv.specs.cross_attention import CrossAttentionRetention
from girih.kv.specs.full_attention import FullAttentionRetention
from girih.kv.specs.sliding_window import SlidingWindowRetention
from girih.kv.specs.state import StateRetention
from girih.kv.state import COLUMNS, TABLE

FULL, WINDOW, STATE = FullAttentionRetention(), SlidingWindowRetention(9), StateRetention()
MIXES = {
    "full": [[(FULL, 3)]],
    "window": [[(FULL, 2), (WINDOW, 3, 8)]],
    "states": [[(FULL, 4), (STATE, 1)]],
    "encoder": [[(FULL, 2), (CrossAttentionRetention(7), 2)]],
    "two pools": [[(FULL, 2)], [(STATE, 2), (WINDOW, 5)]],
}


def start(mix: str, num_slabs: int = 24) -> KVDriver:
    first, configs = 0, []
    for number, groups in enumerate(MIXES[mix]):
        configs.append(make_config(num_slabs, groups, stage_class=number, first_group=first))
        first += len(groups)
    return KVDriver(configs, max_num_seqs=4, state_checkpoint_tokens=8)


def holders_of(driver: KVDriver, group: int) -> dict[int, list[int]]:
    """Page id -> the rows that hold it, cell by cell."""
    state, found = driver.manager._state, {}
    facts, first = state.groups[group], int(state.pool.groups[group, FIRST_PAGE])
    start, columns = int(facts[TABLE]), int(facts[COLUMNS])
    for row in driver.rows:
        for page in state.table[start + row * columns : start + (row + 1) * columns].tolist():
            if page:
                found.setdefault(page - first, []).append(row)
    return found


def verify(driver: KVDriver) -> None:
    """Compare every page of the map with the tables and the pool's own counts."""
    stats, num_free, group = driver.manager.stats(), 0, 0
    for config, mapped in zip(driver.configs, driver.manager.pool_map(), strict=True):
        num_free += int((mapped.owners == NOBODY).sum())
        assert [*mapped.groups] == [*range(group, group + len(config.groups))]
        for group, pages in mapped.groups.items():
            k, holders = driver.groups[group].pages_per_slab, holders_of(driver, group)
            slabs = np.flatnonzero(mapped.owners == group)
            assert pages.rows.shape == pages.num_holders.shape == (len(slabs), k)
            assert len(slabs) == stats.slabs[group]
            assert (pages.rows == CACHED).sum() == stats.cached_pages[group]
            assert (pages.rows == FREE).sum() == stats.free_pages[group]
            seen = {}
            for (i, j), count in np.ndenumerate(pages.num_holders):
                page = int(slabs[i]) * k + j
                is_cached, uses = driver.manager.find_page(group, page)
                assert [use.row for use in uses] == sorted(holders.get(page, []))
                assert count == len(uses)
                if uses:
                    seen[page] = holders[page]
                    assert pages.rows[i, j] == uses[0].row
                else:
                    assert is_cached == (pages.rows[i, j] == CACHED)
            assert seen == holders
        group += 1
    assert num_free == stats.num_free_slabs


def verify_tokens(driver: KVDriver) -> None:
    """Compare the tokens that the map says are in a page with those that the memory has there."""
    for group, spec in enumerate(driver.groups):
        for page, rows in holders_of(driver, group).items():
            held = driver.memory.pages[group].get(page, {})
            for use in driver.manager.find_page(group, page)[1]:
                assert use.row in rows
                known = driver.rows[use.row]
                if spec.retention.holds_state:
                    assert held[0] == tuple(known[: use.end_token])
                    assert use.first_token == max(0, use.end_token - driver.manager.unit)
                elif spec.retention.prefix_cacheable:
                    assert use.first_token % spec.block_size == 0
                    for position in range(use.first_token, use.end_token):
                        assert held[position % spec.block_size] == tuple(known[: position + 1])
                else:
                    assert use.first_token == use.end_token


@pytest.mark.parametrize("mix", MIXES)
def test_the_map_says_of_every_page_what_the_tables_say_while_requests_come_and_go(mix):
    driver, random = start(mix), np.random.default_rng(0)
    for _ in range(40):
        length, branch = random.integers(1, 40), random.integers(1, 40)
        driver.add([i if i < branch else 1000 + branch + i for i in range(length)])
        verify(driver)
        for _ in range(random.integers(1, 4)):
            for row in [row for row, tokens in driver.rows.items() if len(tokens) >= 60]:
                driver.free(row)
            if driver.rows:
                driver.step(int(random.choice([3, 16, 100])))
                verify(driver)
                verify_tokens(driver)
        if driver.rows and random.random() < 0.3:
            driver.free(int(random.choice(list(driver.rows))))
    assert driver.manager.stats().pages_evicted > 0 or mix == "encoder"  # with which nothing is cached


def test_pages_of_a_checkpoint_and_of_a_reused_prefix_are_held_for_the_tokens_before_them():
    driver = start("states")
    driver.run(range(24))
    row = driver.add([*range(24), 99, 98, 97, 96, 95, 94, 93, 92])
    state_pages = holders_of(driver, 1)
    (source,) = [use for page in state_pages for use in driver.manager.find_page(1, page)[1]]
    assert (source.row, source.end_token) == (row, driver.num_cached[row])
    driver.reserve([row], [8])
    driver.manager.publish(np.array([row]), np.array([32]))
    ends = sorted(use.end_token for page in holders_of(driver, 1) for use in driver.manager.find_page(1, page)[1])
    computed = driver.num_cached[row]
    # where it starts from, its own, and what it leaves for a repeated prompt and at every 8 tokens
    assert ends == [computed, computed, 28, 32]
    verify(driver)


def test_slabs_that_were_given_back_are_not_in_the_map():
    driver = start("full", num_slabs=24)
    driver.manager.resize(7)
    assert driver.manager.pool_map()[0].owners.tolist() == [NOBODY] * 7
    driver.add(range(20))
    driver.step()
    verify(driver)
    with pytest.raises(RequestError, match="no page 21 in group 0: it has the pages 0 to 20 now"):
        driver.manager.find_page(0, 21)
    with pytest.raises(RequestError, match="no group 1"):
        driver.manager.find_page(1, 0)


def test_a_map_pickles_small():
    driver = start("window")
    driver.add(range(40))
    driver.step()
    mapped = driver.manager.pool_map()
    text = pickle.dumps(mapped, protocol=5)
    (again,) = pickle.loads(text)
    assert np.array_equal(again.owners, mapped[0].owners)
    assert np.array_equal(again.groups[0].rows, mapped[0].groups[0].rows)
    assert len(text) < 2000
