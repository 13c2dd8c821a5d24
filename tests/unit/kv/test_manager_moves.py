"""Pages that change place, pools that grow and shrink, and stages with pools of their own, while requests run."""

import numpy as np
import pytest
from kv_driver import KVDriver, listed_pages, make_config

from girih.errors import CapacityError
from girih.kv.specs.full_attention import FullAttentionRetention
from girih.kv.specs.sliding_window import SlidingWindowRetention
from girih.kv.specs.state import StateRetention

FULL, STATE = FullAttentionRetention(), StateRetention()


def driver_of(groups, num_slabs, max_model_len=96, **options):
    return KVDriver(make_config(num_slabs, groups, max_model_len), **options)


def lookup(driver, tokens):
    return driver.manager.lookup(np.array(tokens))


def page_ids(driver, group, row):
    table = driver.tables[group][row]
    return table[table != driver.memory.null_ids[group]].tolist()


# --- moves


def test_a_slab_is_emptied_for_another_group_and_what_fits_is_exact():
    driver = driver_of([(FULL, 4), (STATE, 1)], 5, max_num_seqs=8, enable_prefix_caching=False)
    first = driver.add([1, 2])
    long = driver.add(range(10))  # fills the slab of the first one's block
    second = driver.add([3, 4])  # its block is in the next slab
    driver.step()
    assert driver.manager.stats().slabs == (2, 3)
    driver.free(long)
    assert driver.add([5, 6]) is not None
    driver.step()
    assert driver.manager.stats().pages_moved == 0
    before = page_ids(driver, 0, second)
    assert driver.add([7, 8]) is not None
    driver.step()
    assert driver.add([9]) is None  # 4 blocks in one slab and 4 states: full
    stats = driver.manager.stats()
    assert (stats.pages_moved, stats.slabs, stats.free_pages) == (1, (1, 4), (0, 0))
    assert page_ids(driver, 0, second) != before
    assert len(driver.step()) == 1  # a fifth block has no room: the newest gives way
    assert first in driver.rows


def shared_in_the_last_slab(**options):
    """Two requests that share a block in slab 1 of 2; slab 0 has cached pages only."""
    driver = driver_of([(FULL, 4)], 2, max_model_len=32, **options)
    filler = driver.add(range(16))
    driver.step()
    first = driver.add(range(100, 105))
    driver.step()
    second = driver.add([*range(100, 104), 9])
    driver.free(filler)
    return driver, first, second


def test_a_moved_page_moves_in_all_tables_that_hold_it():
    driver, first, second = shared_in_the_last_slab()
    driver.step()
    assert page_ids(driver, 0, first)[0] == page_ids(driver, 0, second)[0] >= 4
    driver.manager.resize(1)
    driver.manager.check()
    driver.step()
    assert page_ids(driver, 0, first)[0] == page_ids(driver, 0, second)[0] < 4
    assert max(page_ids(driver, 0, first) + page_ids(driver, 0, second)) < 4
    assert lookup(driver, [*range(100, 104), 50]) == 4
    driver.step()


def test_a_page_that_moves_before_its_requests_first_step_is_where_that_step_looks():
    driver, _, second = shared_in_the_last_slab()
    assert driver.reserve([second], [1]) == 1
    driver.manager.resize(1)
    driver.compute(np.array([second]), np.array([1]))
    driver.step()


def test_a_checkpoint_or_block_that_is_read_first_moves_with_who_reads_it():
    groups = [(FULL, 2), (STATE, 2)]
    driver = driver_of(groups, 12, max_model_len=48)
    driver.run(range(100, 124))
    driver.run(range(22))
    # go on behind token 22: a copy of a block of two units' tail, and the state where the request ended
    row = driver.add([*range(22), 50, 51])
    assert driver.num_cached[row] == 22
    driver.reserve([row], [2])
    driver.manager.publish(np.array([row]), np.array([24]))
    driver.manager.resize(5)
    assert driver.manager.stats().pages_moved > 0
    driver.compute(np.array([row]), np.array([2]))
    driver.step()


def test_states_that_are_to_be_written_move_before_they_are():
    driver = driver_of([(FULL, 2), (STATE, 1)], 20, max_model_len=48, state_checkpoint_tokens=8)
    driver.run(range(100, 124))
    row = driver.add(range(22))
    driver.reserve([row], [22])
    driver.manager.publish(np.array([row]), np.array([22]))
    held = driver.manager.stats().referenced_pages
    assert held == (6, 1 + 3)  # behind 8, 16 and 20
    driver.manager.resize(3 + 4)
    driver.manager.check()
    driver.compute(np.array([row]), np.array([22]))
    driver.free(row)
    assert [lookup(driver, [*range(length), 99]) for length in (8, 16, 20, 22)] == [8, 16, 20, 22]
    driver.run([*range(16), 50, 51])


def test_pages_may_move_again_before_the_workers_are_told():
    driver = driver_of([(FULL, 2), (SlidingWindowRetention(9), 3)], 24, max_model_len=48)
    rows = [driver.add(range(start, start + 13)) for start in (0, 100, 200)]
    driver.step()
    driver.free(rows[0])
    for num_slabs in (14, 24, 13, 24, 12, 9):
        driver.manager.resize(num_slabs)
        driver.manager.check()
    driver.step()
    driver.free(rows[1])
    for num_slabs in (8, 7, 24):
        driver.manager.resize(num_slabs)
    driver.step()


# --- the pool's size


def test_a_pool_shrinks_to_what_is_held_and_no_further():
    driver = driver_of([(FULL, 2), (STATE, 1)], 20, max_model_len=48)
    driver.run(range(30))
    row = driver.add(range(100, 109))
    driver.step()
    with pytest.raises(CapacityError, match="running requests hold 3"):
        driver.manager.resize(2)
    with pytest.raises(CapacityError, match="made for 20"):
        driver.manager.resize(21)
    driver.manager.check()
    driver.manager.resize(3)
    stats = driver.manager.stats()
    assert (sum(stats.slabs) + stats.num_free_slabs, stats.referenced_pages) == (3, (3, 1))
    driver.step()
    assert not driver.manager.can_admit(np.array([1]))
    driver.manager.resize(20)
    assert driver.manager.can_admit(np.arange(40))
    driver.step()
    driver.free(row)


def test_what_is_cached_moves_into_a_smaller_pool_as_far_as_there_is_room():
    driver = driver_of([(FULL, 2)], 20)
    driver.run(range(24))  # slabs 0, 1, 2
    driver.run(range(100, 124))  # slabs 3, 4, 5
    driver.manager.resize(6)
    assert driver.manager.stats().pages_evicted == 0
    driver.manager.resize(4)
    assert driver.manager.stats().pages_evicted == 4
    assert lookup(driver, range(24)) == 20
    assert lookup(driver, range(100, 124)) == 8
    driver.manager.resize(20)
    assert driver.run([*range(23), 99]) == 20


def test_admission_and_reservation_follow_the_pools_size():
    driver = driver_of([(FULL, 1)], 10, max_model_len=40, max_num_seqs=8, enable_prefix_caching=False)
    answers = []
    for num_slabs in (10, 5, 4, 10):
        driver.manager.resize(num_slabs)
        answers.append(driver.manager.can_admit(np.arange(19)))
    assert answers == [True, True, False, True]
    row = driver.add(range(19))
    driver.manager.resize(3)
    assert driver.manager.max_new_tokens(row, 19) == 12
    assert driver.reserve([row], [13]) == 0
    driver.manager.resize(10)
    assert driver.reserve([row], [19]) == 1


def test_slabs_are_named_once_after_they_were_used_and_are_free():
    driver = driver_of([(FULL, 1)], 6, max_model_len=24)
    assert driver.manager.take_freed_slabs().tolist() == []
    row = driver.add(range(9))
    driver.step()
    assert driver.manager.take_freed_slabs().tolist() == []
    used = page_ids(driver, 0, row)
    driver.free(row)
    # two blocks and a tail are cached
    assert driver.manager.take_freed_slabs().tolist() == []
    driver.manager.reset_prefix_cache()
    assert driver.manager.take_freed_slabs().tolist() == sorted(used)
    assert driver.manager.take_freed_slabs().tolist() == []
    driver.run(range(5))
    driver.manager.reset_prefix_cache()
    assert len(driver.manager.take_freed_slabs()) == 2


def test_a_slab_is_not_given_away_before_its_pages_have_moved():
    driver, _, _ = shared_in_the_last_slab()
    driver.step()
    driver.manager.take_freed_slabs()
    driver.manager.resize(1)
    assert driver.manager.take_freed_slabs().tolist() == []  # the workers have yet to copy out of slab 1
    driver.step()
    assert driver.manager.take_freed_slabs().tolist() == [1]


# --- stages with pools of their own


def two_stages(slabs=(20, 20), **options):
    """Stage class 0 has full attention, class 1 a window and states."""
    plans = [
        make_config(slabs[0], [(FULL, 2)], 48),
        make_config(
            slabs[1], [(SlidingWindowRetention(9), 3), (STATE, 1)], 48, stage_class=1, first_group=1
        ),
    ]  # fmt: skip
    return KVDriver(plans, **options)


def test_each_stage_counts_its_page_ids_from_zero_and_hits_end_at_one_token():
    driver = two_stages()
    driver.run(range(20), num_new=5)
    assert driver.manager.stats().slabs == (3, 2, 2)
    pages = listed_pages(driver.manager, range(20))
    first = driver.manager._pool.first_page
    assert first.tolist() == [1, 41, 101]
    assert (pages[:, 0] < 41).all()
    assert driver.run(range(20), num_new=5) == 16
    row = driver.add([*range(20), 99])
    driver.step()
    assert max(page_ids(driver, 0, row)) < 40
    assert max(page_ids(driver, 1, row)) < 60


@pytest.mark.parametrize(("slabs", "fits"), [((6, 2), True), ((5, 2), False), ((6, 1), False), ((40, 1), False)])
def test_a_request_is_admitted_if_every_stage_has_room(slabs, fits):  # case 77
    # 41 tokens and the next: 11 blocks in 6 slabs; 3 blocks of the window in one slab, and a state in another
    driver = two_stages(slabs)
    assert driver.manager.can_admit(np.arange(41)) == fits
    if fits:
        driver.run(range(41), chunk=4)


def test_the_longest_request_is_that_of_the_smallest_stage():
    assert two_stages((6, 20)).manager.max_request_tokens == 48
    assert two_stages((3, 20)).manager.max_request_tokens == 24
    assert two_stages((20, 1)).manager.max_request_tokens == 0


def test_each_stages_pool_is_resized_by_itself():
    driver = two_stages()
    row = driver.add(range(20))
    driver.step()
    driver.manager.resize(3, stage_class=0)
    with pytest.raises(CapacityError):
        driver.manager.resize(2, stage_class=0)
    driver.manager.resize(3, stage_class=1)
    driver.step()
    stats = driver.manager.stats()
    assert sum(stats.slabs) + stats.num_free_slabs == 6
    driver.free(row)
    driver.manager.reset_prefix_cache()
    for stage_class in (0, 1):
        freed = driver.manager.take_freed_slabs(stage_class).tolist()
        assert set(freed) >= {0, 1, 2}
        assert max(freed) < 20


def test_usage_is_the_share_of_all_slabs():
    driver = two_stages((10, 10))
    driver.add(range(8))
    driver.step()
    assert driver.manager.usage == (1 + 1 + 1) / 20
