"""Blocks of several units: prefixes that end inside one, and pages that can be found under several keys."""

import numpy as np
import pytest
from kv_driver import KVDriver, evict_page, listed_pages, make_config, num_keys

from girih.kv.specs.chunked_local import ChunkedLocalRetention
from girih.kv.specs.full_attention import FullAttentionRetention
from girih.kv.specs.sliding_window import SlidingWindowRetention
from girih.kv.specs.state import StateRetention

FULL = FullAttentionRetention()
LONG = [(FULL, 1, 16), (SlidingWindowRetention(9), 1, 4)]
MIXES = [
    LONG,
    [(FULL, 2, 4), (SlidingWindowRetention(9), 3, 12)],
    [(FULL, 2, 8), (FULL, 1, 12)],
    [(ChunkedLocalRetention(10), 1, 8), (FULL, 1, 4)],
    [(FULL, 1, 8), (SlidingWindowRetention(5), 1, 4), (StateRetention(), 1, 4)],
]


def driver_of(groups, num_slabs=60, max_model_len=96, **options):
    return KVDriver(make_config(num_slabs, groups, max_model_len), state_checkpoint_tokens=4, **options)


def lookup(driver, tokens):
    return driver.manager.lookup(np.array(tokens))


def copies_of_next_step(driver):
    """Do a step of every row and return the pages that it copies, as (group, source, destination)."""
    seen, take = [], driver.manager.take_cache_update
    driver.manager.take_cache_update = lambda *args: seen.append(take(*args)) or seen[0]
    driver.step()
    driver.manager.take_cache_update = take
    return [
        (copies.group, source, destination)
        for copies in seen[0].copies
        for source, destination in zip(copies.sources.tolist(), copies.destinations.tolist(), strict=True)
    ]


@pytest.mark.parametrize(
    ("sizes", "unit"), [((16,), 16), ((32, 48), 16), ((16, 24), 8), ((4, 6), 2), ((3, 5), 1), ((7,), 1)]
)
def test_a_unit_divides_every_block_and_is_16_tokens_where_they_allow(sizes, unit):
    assert driver_of([(FULL, 1, size) for size in sizes], num_slabs=99).manager.unit == unit


@pytest.mark.parametrize("groups", MIXES)
def test_a_prefix_may_end_behind_any_unit(groups):
    driver = driver_of(groups, num_slabs=500)
    driver.run(range(40), chunk=4)
    for length in range(1, 41):
        driver.run([*range(length), 1000 + length])
    hits = [lookup(driver, [*range(length), 99]) for length in range(1, 41)]
    assert hits == [length // 4 * 4 for length in range(1, 40)] + [40]


@pytest.mark.parametrize("groups", MIXES)
@pytest.mark.parametrize("length", [4, 8, 12, 20, 29])
def test_what_a_request_writes_behind_a_shared_part_of_a_block_harms_nobody(groups, length):
    driver = driver_of(groups)
    driver.run(range(30), chunk=4)
    rows = [driver.add([*range(length), *range(start, start + 9)]) for start in (100, 200)]
    for _ in range(6):
        driver.step(3)  # `KVDriver` compares what is read with each row's tokens
    for row in rows:
        driver.free(row)
    assert driver.run([*range(30), 50]) == 30


def test_a_prefix_inside_a_block_is_copied_from_one_page_to_one_of_each_request():
    driver = driver_of(LONG)
    driver.run(range(30))
    source = listed_pages(driver.manager, range(30))[5, 0] - 1
    for start in (100, 200):
        assert driver.num_cached[driver.add([*range(24), *range(start, start + 3)])] == 24
    copies = copies_of_next_step(driver)
    assert [(group, page) for group, page, _ in copies] == [(0, source)] * 2
    assert copies[0][2] != copies[1][2]
    assert copies_of_next_step(driver) == []


def test_a_prefix_of_whole_blocks_is_not_copied():
    driver = driver_of(LONG)
    driver.run(range(36))
    assert driver.num_cached[driver.add([*range(32), 100])] == 32
    assert copies_of_next_step(driver) == []


def test_a_block_that_its_request_still_writes_can_be_started_from():
    driver = driver_of(LONG)
    first = driver.add(range(9))
    driver.step()
    second = driver.add([*range(8), 100])
    assert driver.num_cached[second] == 8
    for _ in range(9):
        driver.step()
    assert len(driver.rows[first]) == 19


def test_the_first_steps_chunk_may_end_anywhere_behind_a_copied_part():
    for chunk in (1, 2, 3, 5, 100):
        driver = driver_of(LONG)
        driver.run(range(30))
        row = driver.add([*range(20), *range(100, 118)])
        assert driver.num_cached[row] == 20
        while len(driver.rows[row]) == 38:
            driver.step(chunk)


def test_a_page_is_listed_under_each_of_its_units_and_evicted_from_all():
    driver = driver_of(LONG)
    driver.run(range(37))
    pages = listed_pages(driver.manager, range(36))[:, 0]
    assert [len({*pages[at : at + 4].tolist()}) for at in (0, 4)] == [1, 1]
    keys = num_keys(driver.manager)
    evict_page(driver.manager, 0, pages[4])
    assert (listed_pages(driver.manager, range(36))[4:8, 0] == 0).all()
    assert num_keys(driver.manager) <= keys
    assert lookup(driver, [*range(36), 99]) == 16


def test_moved_pages_are_found_under_all_their_keys():
    driver = driver_of([(FULL, 3, 16), (SlidingWindowRetention(9), 2, 4)], num_slabs=14)
    for start in (0, 100):
        driver.run(range(start, start + 36))
    for group in (0, 1):
        for page in {*listed_pages(driver.manager, range(36))[:, group].tolist()} - {0}:
            evict_page(driver.manager, group, page)
    before = listed_pages(driver.manager, range(100, 136))
    driver.manager.resize(6)
    driver.manager.check()
    after = listed_pages(driver.manager, range(100, 136))
    assert driver.manager.stats().pages_moved > 0
    assert ((before > 0) == (after > 0)).all()
    assert (before != after)[:, 0].all()
    assert [len({*after[at : at + 4, 0].tolist()}) for at in (0, 4)] == [1, 1]
    driver.manager.resize(14)
    assert driver.run(range(100, 137)) == 36


def test_a_copied_part_of_a_block_does_not_displace_the_whole_block():
    driver = driver_of(LONG)
    driver.run(range(36), chunk=4)
    for suffix in (100, 200, 300):  # each computes a block of its own behind 8 of its tokens
        driver.run([*range(8), *range(suffix, suffix + 3)])
    assert lookup(driver, [*range(36), 99]) == 36
    assert lookup(driver, [*range(8), 99]) == 8


def test_a_whole_block_computed_again_stands_for_all_parts_of_the_older_one():
    driver = driver_of(LONG)
    driver.run(range(36), chunk=4)
    pages = listed_pages(driver.manager, range(32))[:, 0]
    driver.run(range(36), chunk=4, read_cache=False)
    again = listed_pages(driver.manager, range(32))[:, 0]
    assert (again != pages).all()
    assert again[0] == again[3] != again[4] == again[7]
    assert driver.manager.stats().cached_pages[0] == 3
    # the same where the newer block began as a copy: it was not listed for what it copied
    driver.run([*range(8), 500])
    evict_page(driver.manager, 1, listed_pages(driver.manager, range(36))[6, 1])
    assert driver.run(range(36), chunk=4) < 28
    assert [lookup(driver, [*range(length), 99]) for length in (4, 12, 16, 20, 32)] == [4, 12, 16, 20, 32]


def test_tokens_lost_are_counted_to_the_unit():
    driver = driver_of(LONG)
    driver.run(range(45), chunk=4)
    pages = listed_pages(driver.manager, range(44))
    evict_page(driver.manager, 1, pages[9, 1])
    # behind 44, 40 tokens the window reads block 9; behind 36 it does not
    assert driver.run([*range(44), 99]) == 36
    assert driver.manager.stats().tokens_lost_to_window == 8
