"""Which prefixes outlive which, seen from outside."""

import numpy as np
import pytest
from kv_driver import KVDriver, listed_pages, make_config

from girih.kv.pool_state import HITS
from girih.kv.reuse import END, NEW, PROMPT_END
from girih.kv.specs.full_attention import FullAttentionRetention
from girih.kv.specs.sliding_window import SlidingWindowRetention
from girih.kv.specs.state import StateRetention
from girih.kv.state import ORIGIN

FULL, STATE = FullAttentionRetention(), StateRetention()


def driver_of(groups, num_slabs, **options):
    return KVDriver(make_config(num_slabs, groups, max_model_len=96), check=False, **options)


def lookup(driver, tokens):
    return driver.manager.lookup(np.array(tokens))


def one_offs(driver, count, length=12):
    for number in range(count):
        start = 1000 * (2 + number)
        driver.run(range(start, start + length))


def test_the_tail_of_a_sequence_goes_before_its_head():
    driver = KVDriver(make_config(5, [(FULL, 1)], max_model_len=20))
    driver.run(range(17))
    driver.run([100, 101, 102, 103, 104])
    assert lookup(driver, range(17)) == 12


@pytest.mark.parametrize("uses", [1, 4])
@pytest.mark.parametrize(
    "groups", [[(FULL, 1)], [(FULL, 4)], [(FULL, 2), (SlidingWindowRetention(6), 2)], [(FULL, 1, 8), (FULL, 2, 4)]]
)
def test_a_prefix_that_many_share_outlives_later_ones_that_nobody_shares(groups, uses):
    # a prompt that was used once is gone when as much has come after it as the pool holds, a shared one is not
    driver = driver_of(groups, 40)
    for suffix in range(uses):
        driver.run([*range(16), 500 + suffix])
    number = 0
    while driver.manager.stats().pages_evicted < 40:
        driver.run(range(1000 + 20 * number, 1000 + 20 * number + 12))
        number += 1
    assert lookup(driver, [*range(16), 999]) == (16 if uses > 1 else 0)


def test_no_prefix_outlives_its_use_for_ever():
    driver = driver_of([(FULL, 1)], 30)
    for suffix in range(9):
        driver.run([*range(16), 500 + suffix])
    one_offs(driver, 300)
    assert lookup(driver, [*range(16), 999]) == 0


def test_the_state_behind_a_long_prefix_outlives_those_behind_short_ones():
    driver = driver_of([(FULL, 8), (STATE, 1)], 16)
    driver.run(range(64))
    one_offs(driver, 12, length=8)
    assert lookup(driver, range(64)) == 60
    driver = driver_of([(FULL, 8), (STATE, 1)], 16)
    driver.run(range(8))
    one_offs(driver, 12, length=64)
    assert lookup(driver, range(8)) == 0


def test_what_is_read_again_counts_from_then_on():
    driver = driver_of([(FULL, 1)], 24)
    for start in (100, 0):
        driver.run(range(start, start + 16))
    driver.run(range(100, 116))  # of the two it came first
    one_offs(driver, 7)
    assert lookup(driver, range(100, 116)) == 12
    assert lookup(driver, range(16)) == 0


def test_groups_share_the_pool_as_their_pages_are_worth_it():
    # the same prompts in both halves of the pool's life: neither group's pages crowd out the other's
    driver = driver_of([(FULL, 1), (SlidingWindowRetention(6), 1)], 60)
    for _ in range(2):
        for number in range(6):
            driver.run(range(100 * number, 100 * number + 17))
    hits = [lookup(driver, range(100 * number, 100 * number + 17)) for number in range(6)]
    assert hits == [16] * 6


def hits_of(driver, tokens):
    """Return how often each full block of a prompt counts as asked for."""
    pages = listed_pages(driver.manager, tokens)[:, 0]
    return driver.manager._pool.state.pages[pages, HITS].tolist()


@pytest.mark.parametrize("groups", [[(FULL, 1)], [(FULL, 1), (STATE, 1)]])
@pytest.mark.parametrize("length", [16, 18])
def test_a_chat_that_goes_on_does_not_make_what_was_said_worth_more(groups, length):
    driver, said = driver_of(groups, 40), [*range(length)]
    for turn in range(3):
        driver.run(said)
        said += range(100 * turn + 100, 100 * turn + 108)
    assert set(hits_of(driver, said[:16])) == {0}
    driver.run([*range(16), 999, 998])
    assert set(hits_of(driver, said[:16])) == {1}


def test_what_a_prompt_has_to_compute_again_up_to_its_branch_counts_as_asked_for():
    driver = driver_of([(FULL, 1), (STATE, 1)], 40)
    driver.run(range(30))
    assert driver.run([*range(16), *range(500, 510)]) == 0
    assert hits_of(driver, range(20)) == [1, 1, 1, 1, 0]


def test_requests_expect_what_happened_to_those_they_go_on_from():
    driver = driver_of([(FULL, 1), (STATE, 1)], 40)

    def origin(tokens):
        row = driver.add(tokens)
        found = int(driver.manager._state.rows[row, ORIGIN])
        driver.step()
        driver.free(row)
        return found

    assert origin(range(18)) == NEW
    assert origin(range(18)) == PROMPT_END
    assert origin([*range(18), 7, 8, 9]) == END
    assert origin([*range(8), 500, 501]) == NEW
