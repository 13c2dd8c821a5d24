"""Rows, pages, admission and counts of one pool of blocks."""

import numpy as np
import pytest
from kv_driver import KVDriver, make_config

from girih.kv.config import KVCacheConfig
from girih.kv.specs.full_attention import FullAttentionRetention
from girih.kv.specs.sliding_window import SlidingWindowRetention

FULL = FullAttentionRetention()


def full_driver(num_blocks, **options):
    """A pool of single-page slabs for one full-attention group, 4 tokens per block."""
    return KVDriver(make_config(num_blocks, [(FULL, 1)], max_model_len=4 * num_blocks), **options)


def hybrid_driver(num_slabs=12, window=8, max_model_len=64, pages=(2, 3), **options):
    config = make_config(num_slabs, [(FULL, pages[0]), (SlidingWindowRetention(window), pages[1])], max_model_len)
    return KVDriver(config, **options)


def test_a_row_that_cannot_be_served_and_those_behind_it_are_left_as_they_were():
    driver = full_driver(5, max_num_seqs=4, enable_prefix_caching=False)
    rows = [driver.add([start, start + 1]) for start in (0, 10, 20)]
    assert driver.reserve(rows, [2, 60, 2]) == 1
    assert driver.manager.stats().referenced_pages == (1,)
    driver.compute(np.array(rows[:1]), np.array([2]))
    assert (driver.tables[0] < driver.config.null_block_id(0)).sum(axis=1).tolist() == [1, 0, 0, 0]


def test_rows_that_need_no_page_are_served_in_a_full_pool():
    driver = full_driver(3, max_num_seqs=3, enable_prefix_caching=False)
    rows = [driver.add([start]) for start in (0, 10, 20)]
    assert driver.reserve(rows, [1, 1, 1]) == 3
    driver.compute(np.array(rows), np.array([1, 1, 1]))
    assert driver.reserve(rows, [1, 1, 1]) == 3
    driver.compute(np.array(rows), np.array([1, 1, 1]))
    assert driver.reserve(rows, [3, 1, 1]) == 0
    assert driver.reserve(rows[1:], [1, 1]) == 2


def test_max_new_tokens_is_what_reserve_serves_and_shrinks_by_blocks():
    driver = full_driver(6, enable_prefix_caching=False)
    driver.add([7] * 5)
    driver.step()
    row = driver.add([1] * 14)
    assert [driver.manager.max_new_tokens(row, limit) for limit in (1, 14, 15, 16)] == [1, 14, 15, 16]
    assert driver.manager.max_new_tokens(row, 100) == 16
    assert driver.reserve([row], [17]) == 0
    assert driver.reserve([row], [16]) == 1


@pytest.mark.parametrize("caching", [True, False])
def test_what_is_longer_than_the_longest_request_is_not_admitted(caching):
    config = make_config(100, [(FULL, 2)], max_model_len=64)
    driver = KVDriver(config, max_num_seqs=2, enable_prefix_caching=caching)
    row = driver.add(range(64))
    for length in (65, 68, 72, 1000):  # by a token, a unit, and far over what a row has place for
        assert driver.add(range(length)) is None
    assert driver.add(range(1000), read_cache=False) is None
    driver.step(chunk=64)
    driver.free(row)
    assert driver.add(range(64)) is not None
    assert driver.num_cached[row] == (60 if caching else 0)


def test_max_new_tokens_is_zero_when_no_page_is_left():
    driver = full_driver(2, max_num_seqs=3)
    driver.add([1, 2, 3])
    row = driver.add([4, 5, 6, 7][:3])
    driver.step()
    third = driver.manager.max_new_tokens(row, 9)
    assert third == 1
    driver.step()
    assert driver.manager.max_new_tokens(row, 9) == 0


def test_a_request_is_admitted_only_if_it_fits_beside_what_is_referenced():
    driver = full_driver(6, max_num_seqs=3, enable_prefix_caching=False)
    driver.add(range(11))
    driver.step()
    assert not driver.manager.can_admit(np.arange(100, 112))
    assert driver.manager.can_admit(np.arange(100, 111))


def test_shared_pages_count_once_for_admission():
    driver = full_driver(5, max_num_seqs=3)
    driver.add(range(12))
    driver.step()
    assert driver.manager.can_admit(np.arange(12))
    assert not driver.manager.can_admit(np.arange(100, 112))


@pytest.mark.parametrize(("num_slabs", "fits"), [(13, False), (14, True)])
def test_shared_pages_that_will_leave_the_window_do_not_count_as_room(num_slabs, fits):
    driver = hybrid_driver(num_slabs, window=8, pages=(1, 1), max_model_len=28)
    driver.add(range(13))
    driver.step()
    # 4 + 3 pages are in use; the newcomer shares 3 + 2 of them, and at its end 3 + 0
    prompt = np.array([*range(12), *range(100, 112)])
    assert driver.manager.lookup(prompt) == 12
    assert driver.manager.can_admit(prompt) == fits


def test_cached_pages_do_not_stand_in_the_way_of_admission():
    driver = full_driver(6)
    driver.run(range(20))
    assert driver.manager.can_admit(np.arange(100, 123))


def test_admission_counts_every_group_and_slab_as_the_allocation_does():  # case 77
    # the window group's slabs are all in use: pages of the full group do not help
    config = make_config(5, [(FULL, 8), (SlidingWindowRetention(8), 1)], max_model_len=64)
    driver = KVDriver(config, max_num_seqs=3, enable_prefix_caching=False)
    driver.add(range(16))
    driver.step(4)
    driver.step(4)
    assert driver.manager.stats().num_free_slabs == 2
    assert not driver.manager.can_admit(np.arange(100, 108))
    assert driver.manager.can_admit(np.arange(100, 107))


def test_nothing_is_admitted_without_a_free_row():
    driver = full_driver(9, max_num_seqs=1)
    row = driver.add([1])
    assert driver.add([2]) is None
    driver.free(row)
    assert driver.add([2]) is not None


def test_a_row_is_freed_once():
    driver = full_driver(9)
    row = driver.add([1, 2, 3])
    driver.free(row)
    with pytest.raises(AssertionError, match="freed"):
        driver.manager.free(row)
    driver.manager.check()


def test_one_plain_request_leaves_the_pool_as_it_was():  # case 66
    driver = KVDriver(make_config(201, [(FULL, 1)], max_model_len=210, block_size=1), enable_prefix_caching=False)
    driver.run([5], num_new=200, chunk=4)
    assert driver.manager.stats().num_free_slabs == 201
    assert driver.manager.num_running == 0


def test_stats_count_tokens_and_pages():
    driver = full_driver(4)
    driver.run(range(9))
    driver.run(range(9))
    stats = driver.manager.stats()
    # the second run's ninth token took the place of the first one's
    assert (stats.tokens_looked_up, stats.tokens_hit, stats.pages_evicted) == (18, 8, 1)
    assert (stats.cached_pages, stats.free_pages, stats.slabs, stats.num_free_slabs) == ((3,), (0,), (3,), 1)
    driver.run(range(100, 113), num_new=1)
    assert driver.manager.stats().pages_evicted == 1 + 3
    row = driver.add(range(7))
    driver.step()
    assert driver.manager.usage == 0.5
    driver.free(row)
    assert driver.manager.usage == 0


def test_a_model_without_any_cache_runs():  # case 105
    driver = KVDriver(KVCacheConfig(0, 0, (), max_model_len=32))
    assert driver.run(range(20), num_new=5, chunk=7) == 0
    assert driver.manager.usage == 0


def test_a_request_that_ends_when_its_last_unit_is_computed_is_found_to_its_last_token():
    manager = full_driver(8).manager
    row, _ = manager.admit(np.arange(8, dtype=np.int32), num_prompt_tokens=8)
    rows, one = np.array([row]), np.array([1])
    manager.reserve(rows, np.array([8]))
    manager.advance(rows, np.array([8]))
    for token in range(8, 12):
        manager.commit(rows, np.array([token]))
        manager.reserve(rows, one)
        manager.advance(rows, one)
    manager.free(row)
    assert manager.lookup(np.arange(13, dtype=np.int32)) == 12
