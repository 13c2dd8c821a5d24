"""Groups that forget: which blocks are held, kept for later prompts, found again, and missed."""

import numpy as np
import pytest
from kv_driver import KVDriver, evict_page, listed_pages, make_config

from girih.kv.specs.chunked_local import ChunkedLocalRetention
from girih.kv.specs.full_attention import FullAttentionRetention
from girih.kv.specs.sliding_window import SlidingWindowRetention

FULL = FullAttentionRetention()
WINDOW = SlidingWindowRetention(8)
CHUNK = ChunkedLocalRetention(12)


def hybrid_driver(num_slabs=30, kept=WINDOW, max_model_len=64, pages=(1, 1), **options):
    return KVDriver(make_config(num_slabs, [(FULL, pages[0]), (kept, pages[1])], max_model_len), **options)


def lookup(driver, tokens):
    return driver.manager.lookup(np.array(tokens))


def live_columns(driver, group, row):
    return np.flatnonzero(driver.tables[group][row] != driver.memory.null_ids[group]).tolist()


def test_pages_are_freed_as_the_window_moves_and_the_table_shows_null():
    driver = hybrid_driver(pages=(2, 3), enable_prefix_caching=False)
    row = driver.add(range(20))
    held = []
    for _ in range(20):
        driver.step(4)
        held.append(driver.manager.stats().referenced_pages[1])
    assert max(held) == 3
    # 35 tokens are computed; the last step saw tokens 27..34
    assert live_columns(driver, 1, row) == [6, 7, 8]


def test_a_chunk_is_freed_when_the_next_one_starts():
    driver = hybrid_driver(kept=CHUNK, enable_prefix_caching=False)
    row = driver.add(range(22))
    held = []
    for _ in range(6):
        driver.step(4)
        held.append(live_columns(driver, 1, row))
    # chunks of 3 blocks; the step that starts at token 12 still knows the first one
    assert held == [[0], [0, 1], [0, 1, 2], [3], [3, 4], [3, 4, 5]]


@pytest.mark.parametrize("kept", [WINDOW, SlidingWindowRetention(1), SlidingWindowRetention(6), CHUNK])
def test_null_pages_are_never_counted_hashed_or_freed(kept):  # case 63
    driver = hybrid_driver(kept=kept, pages=(2, 3))
    for _ in range(25):
        driver.run(range(25))
        driver.run(range(25), num_new=12)
    assert driver.manager.stats().referenced_pages == (0, 0)
    assert driver.manager.reset_prefix_cache()
    assert driver.manager.stats().num_free_slabs == 30


def test_chunks_of_two_blocks_twice_fifty_times():  # case 63
    config = make_config(40, [(FULL, 1), (ChunkedLocalRetention(32), 1)], max_model_len=128, block_size=16)
    driver = KVDriver(config)
    for _ in range(50):
        hits = [driver.run(range(100)), driver.run(range(100))]
        assert hits[1] == 96
    assert driver.manager.reset_prefix_cache()
    assert driver.manager.stats().num_free_slabs == 40


def test_a_long_prompt_in_chunks_does_not_fill_the_window_groups_pages():  # case 85
    # a window of 8 in a pool of 13 pages, a chunk of 32, a prompt of 200
    driver = hybrid_driver(num_slabs=13 + 51, max_model_len=204)
    assert driver.run(range(200), num_new=4, chunk=32) == 0


# --- what a prefix needs of a window


def test_a_window_needs_its_last_blocks_only_and_never_a_part_of_them():  # case 40
    driver = KVDriver(make_config(20, [(SlidingWindowRetention(4), 1)], block_size=2))
    driver.run(range(8))
    pages = listed_pages(driver.manager, range(8))[:, 0]
    for page in pages[:2]:
        evict_page(driver.manager, 0, page)
    # behind 8 tokens token 8 reads 5, 6, 7: blocks 2 and 3; behind 6 it reads 3, 4, 5: block 1 is gone
    assert lookup(driver, [*range(8), 100]) == 8
    assert lookup(driver, [*range(7), 100]) == 0


def test_a_layer_that_reads_one_token_ahead_takes_one_block_more_or_a_shorter_prefix():  # case 40
    ahead = SlidingWindowRetention(4, hit_trim_tokens=1)
    driver = KVDriver(make_config(20, [(ahead, 1)], block_size=2))
    driver.run(range(8))
    pages = listed_pages(driver.manager, range(8))[:, 0]
    # token 7's entry depends on token 8: it cannot be told from the first 8 tokens
    assert lookup(driver, [*range(8), 100]) == 6
    evict_page(driver.manager, 0, pages[1])
    # behind 6 tokens blocks 1 and 2 are read, behind 4 blocks 0 and 1, behind 2 block 0; block 1 is gone
    assert lookup(driver, [*range(8), 100]) == 0
    evict_page(driver.manager, 0, pages[0])
    assert lookup(driver, [*range(8), 100]) == 0


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize(
    "groups",
    [
        [(SlidingWindowRetention(8, hit_trim_tokens=1), 1)],
        [(FULL, 1), (SlidingWindowRetention(8, hit_trim_tokens=1), 1)],
        [(FullAttentionRetention(hit_trim_tokens=1), 1), (WINDOW, 1)],
        [(FULL, 1, 16), (SlidingWindowRetention(8, hit_trim_tokens=1), 1, 4)],
    ],
)
def test_what_is_stored_for_a_draft_head_is_what_the_next_lookup_asks_for(groups, num_drafts):  # case 42
    driver = KVDriver(make_config(60, groups, max_model_len=80, num_lookahead_tokens=num_drafts))
    assert driver.run(range(64)) == 0
    # of 64 tokens 60 may be reused at most, and the last unit of those needs token 60 to be equal too
    assert driver.run(range(64)) == 56
    assert driver.run([*range(64), 100]) == 60
    assert driver.run([*range(61), *range(100, 118)]) == 56
    assert driver.run([*range(61), *range(100, 118)]) == 72


def test_a_prefix_may_end_where_only_a_chunks_own_blocks_are_kept():
    driver = hybrid_driver(kept=CHUNK)
    driver.run(range(33))
    pages = listed_pages(driver.manager, range(32))[:, 1]
    # a chunk is tokens 0..11, 12..23, 24..35: behind 24 tokens nothing of the second is read
    for block in (3, 4, 5):
        evict_page(driver.manager, 1, pages[block])
    assert [lookup(driver, range(length)) for length in (13, 17, 23, 25, 29, 33)] == [12, 12, 12, 24, 28, 32]


# --- what was lost, and why


def test_tokens_lost_to_a_window_are_counted():
    driver = hybrid_driver()
    driver.run(range(33))
    pages = listed_pages(driver.manager, range(32))[:, 1]
    for block in (5, 6, 7):
        evict_page(driver.manager, 1, pages[block])
    assert driver.run(range(33)) == 20
    stats = driver.manager.stats()
    assert (stats.tokens_lost_to_window, stats.tokens_lost_to_state) == (12, 0)
    # what the full group lacks is nobody's loss
    assert driver.run([*range(20), *range(500, 520)]) == 20
    assert driver.manager.stats().tokens_lost_to_window == 12


def test_a_window_that_lacks_nothing_loses_nothing():
    driver = hybrid_driver()
    for _ in range(3):
        driver.run(range(33), num_new=9)
    driver.run(range(20))
    assert driver.manager.stats().tokens_lost_to_window == 0


# --- what is kept


def test_the_pages_before_the_prompts_last_boundary_outlive_those_that_left_the_window_earlier():
    driver = hybrid_driver(num_slabs=12, max_model_len=40)
    driver.run(range(17), num_new=12, chunk=4)
    # 12 slabs: 7 full pages, 5 of the window group's; blocks 2 and 3 end at the prompt's last boundary, 16
    assert (listed_pages(driver.manager, range(17))[2:, 1] > 0).all()
    assert driver.run(range(17)) == 16


def test_a_prefix_that_several_prompts_share_stays_warm_in_the_window_group():
    # a request needs up to 14 + 4 of the 28 pages
    driver = hybrid_driver(num_slabs=28)
    hits = [
        driver.run([*range(20), *range(suffix, suffix + 30)], num_new=5, chunk=8) for suffix in range(100, 1000, 100)
    ]
    assert hits == [0] + [20] * 8
    assert driver.run([*range(20), 5000]) == 20


def test_pages_that_left_a_window_where_nobody_starts_are_cold():
    driver = hybrid_driver()
    driver.run(range(33), num_new=12, chunk=4)
    stats = driver.manager.stats()
    # of the window's 11 blocks those that are read behind 32 tokens, behind the prompt and behind 44 are worth keeping
    assert stats.cached_pages == (11, 11)
    assert stats.cold_pages == (0, 11 - len({6, 7, 8, 9, 10}))
