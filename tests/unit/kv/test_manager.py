import numpy as np
import pytest
from kv_driver import SECRET, KVDriver, make_config

from girih.errors import PlanError
from girih.kv.config import KVCacheConfig, KVCacheGroupSpec
from girih.kv.manager import KVCacheManager
from girih.kv.specs.full_attention import FullAttentionRetention
from girih.kv.specs.sliding_window import SlidingWindowRetention

FULL = FullAttentionRetention()


def full_driver(num_blocks, **options):
    """A pool of single-page slabs for one full-attention group, 4 tokens per block."""
    return KVDriver(make_config(num_blocks, [(FULL, 1)], max_model_len=4 * num_blocks), **options)


def hybrid_driver(num_slabs=12, window=8, max_model_len=64, pages=(2, 3), **options):
    config = make_config(num_slabs, [(FULL, pages[0]), (SlidingWindowRetention(window), pages[1])], max_model_len)
    return KVDriver(config, **options)


def entries(driver):
    return driver.manager._index.num_entries


# --- prefix cache


def test_a_page_that_is_used_again_is_no_longer_found_under_its_old_tokens():  # case 36
    driver = full_driver(2)
    driver.run([1, 2, 3, 4], num_new=1)
    driver.run([5, 6, 7, 8], num_new=1)
    driver.run([9, 10, 11, 12], num_new=1)
    assert entries(driver) == 2
    assert driver.run([1, 2, 3, 4, 5]) == 0


@pytest.mark.parametrize("length", [4, 8, 9, 12, 1, 3])
def test_at_least_the_last_prompt_token_is_computed_again(length):  # case 37
    driver = full_driver(8)
    assert driver.run(range(length)) == 0
    assert driver.run(range(length)) == (length - 1) // 4 * 4


def test_recomputing_the_last_block_of_a_cached_prompt_does_not_write_into_the_shared_page():  # case 37
    driver = full_driver(8)
    driver.run(range(8))
    first, second = driver.add(range(8)), driver.add(range(8))
    driver.step()
    pages = driver.manager._tables.tables[0][[first, second], :2]
    assert pages[0, 0] == pages[1, 0]
    assert pages[0, 1] != pages[1, 1]
    driver.step()


def test_a_preempted_request_finds_its_own_blocks_and_computes_the_rest():  # case 38
    driver = full_driver(6, max_num_seqs=2)
    driver.add(range(12))
    driver.add(range(100, 112))
    preempted = []
    for _ in range(8):
        preempted += driver.step()
    assert len(preempted) == 1
    (row,) = driver.rows
    while len(driver.rows[row]) < 20:
        driver.step()
    driver.free(row)
    row = driver.add(preempted[0], num_prompt=12)
    assert driver.num_cached[row] % 4 == 0
    while len(driver.rows[row]) < 20:
        driver.step()


def test_all_groups_agree_on_one_hit_length():  # case 51
    driver = hybrid_driver(num_slabs=24, window=8)
    driver.run(range(33))
    # the window's pages of blocks 0..5 left the window; take some of them away
    index, pool = driver.manager._index, driver.manager._pool
    keys = driver.manager._keys.of_prompt(np.arange(33, dtype=np.int32), "")
    assert (index.find(keys)[:, 0] > 0).all()
    assert driver.manager.lookup(np.arange(33)) == 32
    assert driver.manager.lookup(np.arange(24)) == 20
    cold = index.find(keys)[3, 1]
    index.forget(np.array([[cold, pool.tags[cold]]], dtype=np.int32))
    # boundaries 4 and 5 need block 3 in the window group; 3 does not, and ends before it
    assert [driver.manager.lookup(np.arange(length)) for length in (17, 21, 25, 33)] == [12, 12, 24, 32]
    pool.tags[cold] = 0


def test_salts_share_nothing_and_equal_salts_do():  # case 53
    driver = full_driver(40)
    tokens = list(range(12))
    for salt in ("", "X", "ab", "a"):
        assert driver.run(tokens, salt=salt) == 0
    assert [driver.run(tokens, salt=salt) for salt in ("", "X", "ab", "a")] == [8] * 4
    assert driver.manager.lookup(np.array(tokens), "b") == 0


def test_managers_with_one_secret_make_the_same_keys_and_others_do_not():  # case 55
    tokens = np.arange(8, dtype=np.int32)
    config = make_config(4, [(FULL, 1)])
    made = [
        KVCacheManager(config, max_num_seqs=1, **options)._keys.of_prompt(tokens, "").tolist()
        for options in ({"secret": SECRET}, {"secret": SECRET}, {}, {})
    ]
    assert made[0] == made[1]
    assert made[2] != made[3] != made[0]


def test_a_reset_forgets_everything_and_is_refused_while_a_request_runs():  # case 57
    driver = hybrid_driver()
    driver.run(range(20))
    row = driver.add(range(20))
    assert driver.num_cached[row] == 16
    assert driver.manager.reset_prefix_cache() is False
    assert driver.manager.lookup(np.arange(20)) == 16
    driver.free(row)
    assert driver.manager.reset_prefix_cache() is True
    driver.manager.check()
    assert entries(driver) == 0
    assert driver.run(range(20)) == 0


def test_two_equal_prompts_in_one_step_share_what_the_first_one_published():
    driver = full_driver(12)
    first = driver.add(range(9))
    driver.reserve([first], [9])
    driver.manager.publish(np.array([first]), np.array([9]))
    second = driver.add(range(9))
    assert driver.num_cached[second] == 8
    driver.reserve([second], [1])
    driver.compute(np.array([first, second]), np.array([9, 1]))


def test_private_copies_of_published_blocks_stay_private_and_are_freed_at_once():  # case 59
    driver = full_driver(12, max_num_seqs=3)
    first, second = driver.add(range(16)), driver.add(range(16))
    for _ in range(4):
        driver.step(4)
    assert entries(driver) == 4
    for _ in range(8):
        driver.step(sample=lambda row: 7)
    assert entries(driver) == 6
    driver.free(second)
    assert driver.manager.stats().cached_pages == (0,)
    third = driver.add([200, 201, 202])
    for _ in range(5):
        driver.step()
    assert {len(driver.rows[row]) for row in (first, third)} == {30, 8}


def test_a_copy_of_a_cached_block_replaces_it_so_that_the_older_page_is_free_at_once():
    driver = full_driver(12)
    driver.run(range(16))
    driver.run(range(16), read_cache=False)
    stats = driver.manager.stats()
    assert (stats.cached_pages, stats.num_free_slabs) == ((4,), 8)
    assert driver.run(range(16)) == 12


def test_blocks_are_published_when_their_last_token_is_computed_not_when_it_is_sampled():
    driver = full_driver(8)
    row = driver.add([1, 2])
    found = []
    for _ in range(4):
        driver.step(sample=lambda row: 9)
        found.append(driver.manager.lookup(np.array([1, 2, 9, 9, 9, 9])))
    # after the second step 4 tokens are known and 3 computed
    assert len(driver.rows[row]) == 6
    assert found == [0, 0, 4, 4]


def test_output_is_found_by_the_next_turn():
    driver = hybrid_driver(num_slabs=30)
    row = driver.add(range(10))
    for _ in range(10):
        driver.step(sample=lambda row: 50)
    tokens = driver.rows[row]
    driver.free(row)
    assert driver.manager.lookup(np.array([*tokens, 1, 2, 3])) == 16


def test_without_prefix_caching_nothing_is_found_or_kept():
    driver = hybrid_driver(enable_prefix_caching=False)
    assert [driver.run(range(20)), driver.run(range(20))] == [0, 0]
    stats = driver.manager.stats()
    assert (stats.cached_pages, stats.tokens_looked_up) == ((0, 0), 0)


def test_a_request_may_decline_to_read_the_cache_but_still_fills_it():
    driver = full_driver(12)
    assert driver.run(range(8), read_cache=False) == 0
    assert driver.run(range(8), read_cache=False) == 0
    assert driver.run(range(8)) == 4


def test_the_tail_of_a_sequence_is_evicted_before_its_head():
    driver = full_driver(5)
    driver.run(range(17), num_new=1)
    driver.run([100, 101, 102, 103, 104], num_new=1)
    assert driver.manager.lookup(np.arange(17)) == 12


# --- windows


def test_pages_are_freed_as_the_window_moves_and_the_table_shows_null():
    driver = hybrid_driver(num_slabs=30, window=8, enable_prefix_caching=False)
    row = driver.add(range(20))
    held = []
    for _ in range(20):
        driver.step(4)
        held.append(driver.manager.stats().referenced_pages[1])
    assert max(held) == 3
    table = driver.manager._tables.tables[1][row]
    live = np.flatnonzero(table != driver.config.null_block_id(1))
    assert live.tolist() == [7, 8]


def test_the_null_page_is_never_counted_hashed_or_freed():  # case 63
    driver = hybrid_driver(num_slabs=30, window=6)
    for _ in range(50):
        driver.run(range(25))
        driver.run(range(25), num_new=12)
    stats = driver.manager.stats()
    assert stats.referenced_pages == (0, 0)
    assert driver.manager.reset_prefix_cache()
    assert driver.manager.stats().num_free_slabs == 30


def test_a_long_prompt_in_chunks_does_not_fill_the_window_groups_pages():  # case 85
    # a window of 8 in a pool of 13 pages, a chunk of 32, a prompt of 200
    config = make_config(13 + 51, [(FULL, 1), (SlidingWindowRetention(8), 1)], max_model_len=204)
    driver = KVDriver(config)
    assert driver.run(range(200), num_new=4, chunk=32) == 0


def test_the_pages_before_the_prompts_last_boundary_outlive_those_that_left_the_window_earlier():
    driver = hybrid_driver(num_slabs=12, window=8, pages=(1, 1), max_model_len=40)
    driver.run(range(17), num_new=12, chunk=4)
    keys = driver.manager._keys.of_prompt(np.arange(17, dtype=np.int32), "")
    # 12 slabs: 7 full pages, 5 of the window group's; blocks 2 and 3 end at the prompt's last boundary, 16
    found = driver.manager._index.find(keys)[:, 1] > 0
    assert found[2:].all()
    assert driver.run(range(17)) == 16


def test_a_prefix_that_several_prompts_share_stays_warm_in_the_window_group():
    driver = hybrid_driver(num_slabs=20, window=8, pages=(1, 1))
    for suffix in range(100, 1000, 100):
        driver.run([*range(20), *range(suffix, suffix + 30)], num_new=5, chunk=8)
    assert driver.run([*range(20), 5000]) == 20


# --- pages and rows


def test_a_row_that_cannot_be_served_and_those_behind_it_are_left_as_they_were():
    driver = full_driver(5, max_num_seqs=4, enable_prefix_caching=False)
    rows = [driver.add([start, start + 1]) for start in (0, 10, 20)]
    before = driver.manager._tables.last.copy()
    assert driver.reserve(rows, [2, 60, 2]) == 1
    after = driver.manager._tables.last
    assert (after - before)[0, rows].tolist() == [1, 0, 0]
    driver.manager.check()


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
    assert (stats.tokens_looked_up, stats.tokens_hit, stats.pages_evicted) == (18, 8, 0)
    assert (stats.cached_pages, stats.free_pages, stats.slabs, stats.num_free_slabs) == ((2,), (0,), (2,), 2)
    driver.run(range(100, 113), num_new=1)
    assert driver.manager.stats().pages_evicted == 2
    row = driver.add(range(7))
    driver.step()
    assert driver.manager.usage == 0.5
    driver.free(row)
    assert driver.manager.usage == 0


def test_a_model_without_any_cache_runs():  # case 105
    driver = KVDriver(KVCacheConfig(0, 0, (), max_model_len=32))
    assert driver.run(range(20), num_new=5, chunk=7) == 0
    assert driver.manager.usage == 0


def test_groups_with_different_block_sizes_are_refused():
    groups = tuple(KVCacheGroupSpec(FULL, size, (), 1, 16, 1) for size in (16, 32))
    with pytest.raises(PlanError, match=r"\[16, 32\]"):
        KVCacheManager(KVCacheConfig(4, 16, groups, 64), max_num_seqs=1)
