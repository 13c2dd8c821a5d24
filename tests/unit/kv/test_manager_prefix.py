"""Which prefixes are found, and that what is found is what was written."""

import numpy as np
import pytest
from kv_driver import SECRET, KVDriver, evict_page, listed_pages, make_config, num_keys

from girih.kv.manager import KVCacheManager
from girih.kv.specs.full_attention import FullAttentionRetention
from girih.kv.specs.sliding_window import SlidingWindowRetention
from girih.kv.specs.state import StateRetention

FULL = FullAttentionRetention()


def full_driver(num_blocks, **options):
    """A pool of single-page slabs for one full-attention group, 4 tokens per block."""
    return KVDriver(make_config(num_blocks, [(FULL, 1)], max_model_len=4 * num_blocks), **options)


def hybrid_driver(num_slabs=12, window=8, max_model_len=64, pages=(2, 3), **options):
    config = make_config(num_slabs, [(FULL, pages[0]), (SlidingWindowRetention(window), pages[1])], max_model_len)
    return KVDriver(config, **options)


def lookup(driver, tokens, salt=""):
    return driver.manager.lookup(np.array(tokens), salt)


def test_a_page_that_is_used_again_is_no_longer_found_under_its_old_tokens():  # case 36
    driver = full_driver(2)
    driver.run([1, 2, 3, 4])
    driver.run([5, 6, 7, 8])
    driver.run([9, 10, 11, 12])
    assert num_keys(driver.manager) == 2
    assert listed_pages(driver.manager, [1, 2, 3, 4]).tolist() == [[0]]
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
    pages = driver.tables[0][[first, second], :2]
    assert pages[0, 0] == pages[1, 0]
    assert pages[0, 1] != pages[1, 1]
    driver.step()


def test_all_groups_agree_on_one_hit_length():  # case 51
    driver = hybrid_driver(num_slabs=24, window=8)
    driver.run(range(33))
    pages = listed_pages(driver.manager, range(33))
    assert (pages > 0).all()
    assert [lookup(driver, range(length)) for length in (24, 33)] == [20, 32]
    evict_page(driver.manager, 1, pages[3, 1])
    # boundaries 4 and 5 need block 3 in the window group; 3 does not, and ends before it
    assert [lookup(driver, range(length)) for length in (17, 21, 25, 33)] == [12, 12, 24, 32]


# --- who shares with whom


@pytest.mark.parametrize(
    "spaces",
    [
        ["", "X", "ab", "a", "a\0"],  # salts of tenants
        ["lora:X", "salt:X", "lora:X/salt:", "lora:/salt:X", "2:ab1:c", "1:a2:bc"],  # what a caller frames by itself
    ],
)
def test_salts_share_nothing_and_equal_salts_do(spaces):  # case 53
    driver = full_driver(60)
    tokens = list(range(12))
    assert [driver.run(tokens, salt=salt) for salt in spaces] == [0] * len(spaces)
    assert [driver.run(tokens, salt=salt) for salt in spaces] == [8] * len(spaces)
    assert lookup(driver, tokens, "b") == 0


def test_an_adapter_that_is_loaded_again_under_its_name_finds_nothing_of_the_old_one():  # case 54
    # the salt of an adapter carries how often it was loaded
    driver = full_driver(40)
    driver.run(range(12), salt="a, load 1")
    assert driver.run(range(12), salt="a, load 2") == 0
    assert driver.run(range(12), salt="a, load 2") == 8


def test_managers_with_one_secret_make_the_same_keys_and_others_do_not():  # case 55
    config = make_config(4, [(FULL, 1)])
    secrets = [
        KVCacheManager(config, max_num_seqs=1, **options)._hasher.secret.tolist()
        for options in ({"secret": SECRET}, {"secret": SECRET}, {}, {})
    ]
    assert secrets[0] == secrets[1]
    assert secrets[2] != secrets[3] != secrets[0]


def test_a_reset_forgets_everything_and_is_refused_while_a_request_runs():  # case 57
    driver = hybrid_driver()
    driver.run(range(20))
    row = driver.add(range(20))
    assert driver.num_cached[row] == 16
    assert driver.manager.reset_prefix_cache() is False
    assert lookup(driver, range(20)) == 16
    driver.free(row)
    assert driver.manager.reset_prefix_cache() is True
    driver.manager.check()
    assert num_keys(driver.manager) == 0
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
    assert num_keys(driver.manager) == 4
    for _ in range(8):
        driver.step(sample=lambda row: 7)
    assert num_keys(driver.manager) == 6
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
        found.append(lookup(driver, [1, 2, 9, 9, 9, 9]))
    # after the second step 4 tokens are known and 3 computed
    assert len(driver.rows[row]) == 6
    assert found == [0, 0, 4, 4]


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


def test_half_of_a_prefix_in_other_words_is_no_prefix():
    driver = full_driver(12)
    driver.run(range(16))
    assert lookup(driver, [*range(8), 99, *range(9, 16)]) == 8
    assert lookup(driver, [99, *range(1, 16)]) == 0


# --- the exact token where a request ended


@pytest.mark.parametrize("num_new", [1, 2, 3, 4, 5, 15, 16])
@pytest.mark.parametrize(
    "groups",
    [
        [(FULL, 1)],
        [(FULL, 2), (SlidingWindowRetention(6), 3)],
        [(FULL, 2), (StateRetention(), 1)],
        [(StateRetention(), 2)],
        [(FULL, 1, 8), (SlidingWindowRetention(9), 2, 4), (StateRetention(), 1, 4)],
    ],
)
def test_the_next_turn_of_a_chat_goes_on_at_the_exact_token(groups, num_new):
    driver = KVDriver(make_config(60, groups))
    row = driver.add(range(34))
    for _ in range(num_new):
        driver.step(sample=lambda row: 50)
    turn = driver.rows[row]
    driver.free(row)
    # the last token was sampled and never computed
    assert driver.run([*turn, 1, 2, 3]) == 34 + num_new - 1


def test_a_block_that_ends_a_reused_tail_is_copied_and_the_original_stays_as_it_is():
    driver = full_driver(12, max_num_seqs=3)
    driver.run(range(10))
    first, second = driver.add([*range(10), 50, 51, 52]), driver.add([*range(10), 60, 61, 62, 63])
    assert (driver.num_cached[first], driver.num_cached[second]) == (10, 10)
    driver.step()  # `KVDriver` compares what both read with their own tokens
    tail = driver.tables[0][[first, second], 2]
    assert tail[0] != tail[1]
    assert lookup(driver, [*range(10), 70]) == 10


def test_only_the_same_tail_is_reused():
    driver = full_driver(12)
    driver.run(range(11))
    assert lookup(driver, [*range(11), 50]) == 11
    assert lookup(driver, [*range(10), 99, 50]) == 8
    assert lookup(driver, range(11)) == 8  # a token must be left to compute
    assert lookup(driver, range(9)) == 8


def test_of_two_tails_behind_one_unit_the_later_is_found_and_both_leave_no_trace():
    driver = full_driver(12)
    driver.run([*range(8), 20, 21])
    driver.run([*range(8), 30])
    assert lookup(driver, [*range(8), 30, 1]) == 9
    assert lookup(driver, [*range(8), 20, 21, 1]) == 8
    assert driver.manager.reset_prefix_cache()
    assert num_keys(driver.manager) == 0


def test_a_chat_of_states_only_goes_on_at_the_exact_token_turn_after_turn():
    # units are listed where there are checkpoints only; each turn ends some units behind one
    driver = KVDriver(make_config(8, [(StateRetention(), 1)], max_model_len=400))
    tokens, hits = [*range(20)], []
    for turn in range(4):
        row = driver.add(tokens)
        hits.append(len(tokens) - driver.num_cached[row])
        for _ in range(70):
            driver.step(sample=lambda row: 50)
        tokens = [*driver.rows[row], turn, 60, 61]
        driver.free(row)
    assert hits == [20, 4, 4, 4]  # of each later turn the last sampled token and three new ones


def test_a_request_without_a_full_unit_leaves_no_tail():
    driver = full_driver(8)
    driver.run([1, 2])
    assert num_keys(driver.manager) == 0
    assert driver.manager.stats().cached_pages == (0,)


@pytest.mark.parametrize("groups", [[(FULL, 1)], [(FULL, 1), (SlidingWindowRetention(6), 1)], [(StateRetention(), 1)]])
@pytest.mark.parametrize("num_steps", [1, 3, 4, 11, 12, 20])
def test_a_preempted_request_goes_on_at_the_exact_token(groups, num_steps):  # case 38
    driver = KVDriver(make_config(40, groups))
    row = driver.add(range(21))
    for _ in range(num_steps):
        driver.step(sample=lambda row: 7)
    tokens = driver.rows[row]
    driver.free(row)
    row = driver.add(tokens, num_prompt=21)
    assert driver.num_cached[row] == len(tokens) - 1
    driver.step()


def test_a_request_preempted_within_its_prompt_goes_on_at_the_last_full_unit():  # case 38
    driver = full_driver(12)
    row = driver.add(range(30))
    driver.step(7)
    driver.step(7)
    driver.free(row)
    row = driver.add(range(30))
    assert driver.num_cached[row] == 12
    driver.step()


def test_a_preempted_request_whose_blocks_were_taken_computes_what_is_missing():  # case 38
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
    assert 0 < driver.num_cached[row] < len(preempted[0]) - 1
    while len(driver.rows[row]) < 20:
        driver.step()
