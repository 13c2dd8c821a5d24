"""What workers are told before a step: each change once, and in an order that can be carried out."""

from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest
from kv_driver import KVDriver, make_config

from girih.errors import CapacityError
from girih.kv import state as s
from girih.kv.config import KVCacheConfig
from girih.kv.specs.full_attention import FullAttentionRetention
from girih.kv.specs.sliding_window import SlidingWindowRetention
from girih.kv.specs.state import StateRetention

FULL, WINDOW, STATE = FullAttentionRetention(), SlidingWindowRetention(6), StateRetention()


def driver_of(groups, num_slabs=40, max_model_len=48, **options):
    return KVDriver(make_config(num_slabs, groups, max_model_len), **options)


def next_step(driver, counts):
    """Do a step with so many tokens of each row and return its `CacheUpdate`."""
    rows, counts = np.array(list(counts)), np.array(list(counts.values()))
    assert driver.reserve(rows, counts) == len(rows)
    driver.manager.publish(rows, driver.manager.num_computed_tokens[rows] + counts)
    seen, take = [], driver.manager.take_cache_update
    driver.manager.take_cache_update = lambda *args: seen.append(take(*args)) or seen[0]
    driver.compute(rows, counts)
    driver.manager.take_cache_update = take
    return seen[0]


def cells(update, group):
    table = update.tables[group]
    assert {table.rows.dtype, table.columns.dtype, table.block_ids.dtype} == {np.dtype(np.int32)}
    return list(zip(table.rows.tolist(), table.columns.tolist(), strict=True))


def test_a_row_is_told_its_new_columns_only():
    driver = driver_of([(FULL, 1)])
    row = driver.add(range(10))
    told = [cells(next_step(driver, {row: count}), 0) for count in (5, 5, 1, 1, 1)]
    assert told == [[(row, 0), (row, 1)], [(row, 2)], [], [], [(row, 3)]]


def test_what_left_the_window_is_told_as_the_null_page():
    driver = driver_of([(FULL, 1), (WINDOW, 1)])
    row = driver.add(range(20))
    next_step(driver, {row: 8})
    update = next_step(driver, {row: 4})
    # behind 8 tokens token 8 reads 3..8
    assert cells(update, 1) == [(row, 2)]
    update = next_step(driver, {row: 4})
    assert cells(update, 1) == [(row, 0), (row, 3)]
    assert update.tables[1].block_ids[0] == driver.memory.null_ids[1]


def test_a_block_that_came_and_went_between_two_steps_is_not_told():
    driver = driver_of([(WINDOW, 1)])
    driver.run(range(40))
    row = driver.add([*range(36), 99])
    assert driver.num_cached[row] == 36
    assert cells(next_step(driver, {row: 1}), 0) == [(row, 7), (row, 8), (row, 9)]


def test_a_freed_row_is_told_nothing_and_the_next_request_in_it_everything():
    driver = driver_of([(FULL, 1), (WINDOW, 1)], max_num_seqs=2)
    first, other = driver.add(range(9)), driver.add(range(100, 103))
    next_step(driver, {first: 9, other: 3})
    driver.free(first)
    assert cells(next_step(driver, {other: 1}), 0) == []
    again = driver.add([50, 51])
    assert again == first
    assert cells(next_step(driver, {again: 2}), 0) == [(again, 0)]


def test_a_row_that_is_given_back_and_taken_between_two_steps_is_told_as_new():
    driver = driver_of([(FULL, 1)], max_num_seqs=1, enable_prefix_caching=False)
    row = driver.add(range(12))
    next_step(driver, {row: 12})
    driver.free(row)
    assert driver.add(range(100, 106)) == row
    assert cells(next_step(driver, {row: 6}), 0) == [(row, 0), (row, 1)]


def test_rows_that_do_not_run_in_a_step_are_told_all_the_same():
    driver = driver_of([(FULL, 1)])
    first, second = driver.add(range(9)), driver.add(range(100, 109))
    driver.reserve([first, second], [9, 9])
    update = driver.manager.take_cache_update(np.array([second]))
    assert cells(update, 0) == [(first, 0), (first, 1), (first, 2), (second, 0), (second, 1), (second, 2)]
    update = driver.manager.take_cache_update(np.array([first]))
    assert cells(update, 0) == []


def test_a_step_without_news_is_empty():
    driver = driver_of([(FULL, 1), (WINDOW, 1)])
    row = driver.add(range(9))
    next_step(driver, {row: 9})
    next_step(driver, {row: 1})
    update = next_step(driver, {row: 1})
    assert (update.moves, update.copies, update.states) == ((), (), {})
    assert [cells(update, group) for group in (0, 1)] == [[], []]


def test_a_model_without_caches_is_told_nothing():
    driver = KVDriver(KVCacheConfig(0, 0, (), max_model_len=32))
    update = next_step(driver, {driver.add(range(5)): 5})
    assert (update.moves, update.copies, update.tables, update.states) == ((), (), (), {})


@pytest.mark.parametrize("seed", range(4))
def test_tables_of_workers_that_apply_all_updates_are_the_managers(seed):
    groups = [(FULL, 2, 8), (WINDOW, 3, 4), (STATE, 1)]
    driver = driver_of(groups, num_slabs=22, max_num_seqs=4, check=False)
    random = np.random.default_rng(seed)
    for _ in range(60):
        if random.random() < 0.4:
            start = int(random.integers(2)) * 100
            driver.add([*range(start, start + int(random.integers(1, 20))), *range(int(random.integers(9)))])
        if driver.rows:
            driver.step(int(random.integers(1, 12)))
        for group in (0, 1):
            own = manager_tables(driver, group)
            for row in driver.rows:
                assert told_is_own(driver.tables[group][row], own[row], driver.memory.null_ids[group])
        for row in list(driver.rows):
            if random.random() < 0.1 or len(driver.rows[row]) > 40:
                driver.free(row)
        with suppress(CapacityError):
            driver.manager.resize(int(random.integers(8, 23)))
    assert driver.manager.stats().pages_moved > 0


def manager_tables(driver, group):
    """Return page ids of a group, int [rows, columns], -1 for none."""
    state, (num_rows, width) = driver.manager._state, driver.tables[group].shape
    start, columns = state.groups[group, s.TABLE], state.groups[group, s.COLUMNS]
    pages = state.table[start : start + num_rows * columns].reshape(num_rows, columns)[:, :width]
    return np.where(pages > 0, pages - driver.manager._pool.first_page[group], -1)


def told_is_own(told, own, null_id):
    # a block that left a window in this step's result is told before the next one
    live = own >= 0
    return (told[live] == own[live]).all() and (told[np.cumsum(live[::-1])[::-1] == 0] == null_id).all()


# --- moves, then copies


def in_order(moves):
    """Return the moves, one after the other, and how many runs they were cut into."""
    pairs = [
        (run.group, source, destination)
        for run in moves
        for source, destination in zip(run.sources.tolist(), run.destinations.tolist(), strict=True)
    ]
    return pairs, len(moves)


def test_a_page_that_moves_twice_is_moved_in_two_runs():
    driver = driver_of([(FULL, 1)], num_slabs=12)
    blocker, row = driver.add(range(100, 123)), driver.add(range(3))
    next_step(driver, {blocker: 23, row: 3})
    page = int(driver.tables[0][row, 0])
    assert page == 6
    driver.free(blocker)
    driver.manager.reset_prefix_cache()
    for num_slabs in (6, 12, 5, 4, 3, 2, 1):
        driver.manager.resize(num_slabs)
    update = next_step(driver, {row: 1})
    pairs, num_runs = in_order(update.moves)
    assert pairs[0][1] == page
    assert all(before[2] == after[1] for before, after in pairwise(pairs))
    assert pairs[-1][2] == driver.tables[0][row, 0] == 0
    assert num_runs == len(pairs)


def test_moves_of_different_groups_are_different_runs_and_are_told_once():
    driver = driver_of([(FULL, 2), (WINDOW, 2), (STATE, 1)], num_slabs=30)
    rows = [driver.add(range(start, start + 13)) for start in (0, 100, 200)]
    next_step(driver, dict.fromkeys(rows, 13))
    driver.free(rows[0])
    driver.manager.resize(13)
    driver.manager.resize(11)
    update = next_step(driver, dict.fromkeys(rows[1:], 1))
    assert len({run.group for run in update.moves}) > 1
    for run in update.moves:
        assert not {*run.sources.tolist()} & {*run.destinations.tolist()}
        assert len({*run.destinations.tolist()}) == len(run.destinations)
    assert next_step(driver, dict.fromkeys(rows[1:], 1)).moves == ()


def test_a_table_entry_of_a_moved_page_is_told_again():
    driver = driver_of([(FULL, 1)], num_slabs=12)
    blocker, row = driver.add(range(100, 123)), driver.add(range(7))
    next_step(driver, {blocker: 23, row: 7})
    driver.free(blocker)
    driver.manager.resize(7)
    update = next_step(driver, {row: 1})
    assert len(in_order(update.moves)[0]) == 1  # the second of its two blocks
    assert cells(update, 0) == [(row, 1)]


def test_a_copy_is_told_in_the_step_that_writes_behind_it_and_from_where_its_source_is_then():
    driver = driver_of([(FULL, 1)], num_slabs=12)
    driver.run(range(100, 124))
    driver.run(range(6))
    row = driver.add([*range(6), 50, 51, 52])
    assert driver.num_cached[row] == 6
    driver.reserve([row], [3])
    driver.manager.resize(6)  # the source moves
    update = next_step(driver, {row: 3})
    (copies,) = update.copies
    moved = {source: destination for _, source, destination in in_order(update.moves)[0]}
    assert len(copies.sources) == 1
    assert copies.sources[0] in moved.values()
    assert copies.destinations[0] == driver.tables[0][row, 1]
    assert next_step(driver, {row: 1}).copies == ()


# --- states


def test_states_are_given_in_the_order_of_the_steps_rows():
    driver = driver_of([(STATE, 1), (FULL, 1)])
    rows = [driver.add(range(start, start + 5)) for start in (0, 100, 200)]
    first = next_step(driver, {rows[2]: 5, rows[0]: 5}).states[0]
    assert first.state_in.tolist() == [driver.memory.null_ids[0]] * 2
    second = next_step(driver, {rows[0]: 1, rows[1]: 5, rows[2]: 1}).states[0]
    assert second.state_in.tolist() == [first.state_out[1], driver.memory.null_ids[0], first.state_out[0]]
    assert second.state_out.tolist() == [first.state_out[1], second.state_out[1], first.state_out[0]]
    assert {array.dtype for array in vars(second).values()} == {np.dtype(np.int32)}


def test_block_tables_say_nothing_of_states():
    driver = driver_of([(STATE, 1), (FULL, 1)])
    update = next_step(driver, {driver.add(range(9)): 9})
    assert cells(update, 0) == []
    assert sorted(update.states) == [0]
