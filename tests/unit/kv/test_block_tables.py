import numpy as np
from kv_driver import make_config

from girih.kv.block_tables import BlockTables, ragged_range
from girih.kv.specs.full_attention import FullAttentionRetention
from girih.kv.specs.sliding_window import SlidingWindowRetention

NULL = [10, 15]


def make():
    plan = make_config(5, [(FullAttentionRetention(), 2), (SlidingWindowRetention(4), 3)], max_model_len=20)
    return BlockTables(plan, max_num_seqs=3)


def apply(copy, tables):
    for table, update in zip(copy, tables.take_updates(), strict=True):
        table[update.rows, update.columns] = update.block_ids
        assert {update.rows.dtype, update.columns.dtype, update.block_ids.dtype} == {np.dtype(np.int32)}
    assert all(np.array_equal(a, b) for a, b in zip(copy, tables.tables, strict=True))


def test_ragged_ranges_follow_one_another():
    assert ragged_range(np.array([5, 0, 7]), np.array([2, 0, 3])).tolist() == [5, 6, 7, 8, 9]
    assert ragged_range(np.array([], dtype=int), np.array([], dtype=int)).tolist() == []


def test_a_new_table_holds_each_groups_null_id():
    tables = make()
    assert [table.shape for table in tables.tables] == [(3, 5), (3, 5)]
    assert [set(table.ravel().tolist()) for table in tables.tables] == [{10}, {15}]


def test_pages_are_appended_behind_each_rows_last_column():
    tables = make()
    tables.append(0, np.array([2, 0]), np.array([2, 1]), np.array([7, 8, 9]))
    tables.append(0, np.array([0, 2]), np.array([1, 1]), np.array([1, 2]))
    assert tables.tables[0].tolist() == [[9, 1, 10, 10, 10], [10] * 5, [7, 8, 2, 10, 10]]
    assert tables.last[0].tolist() == [2, 0, 3]


def test_what_left_the_window_is_null_and_is_handed_back_with_its_place():
    tables = make()
    tables.place(1, 0, 1, np.array([4, 5, 6]))
    tables.place(1, 1, 0, np.array([7]))
    rows, columns, block_ids = tables.drop_before(1, np.array([0, 1]), np.array([3, 0]))
    assert (rows.tolist(), columns.tolist(), block_ids.tolist()) == ([0, 0], [1, 2], [4, 5])
    assert tables.tables[1][0].tolist() == [15, 15, 15, 6, 15]
    assert (tables.first[1, 0], tables.last[1, 0]) == (3, 4)


def test_a_cleared_row_is_as_new():
    tables = make()
    tables.place(1, 2, 2, np.array([4, 5]))
    assert tables.clear(1, 2).tolist() == [4, 5]
    assert set(tables.tables[1][2].tolist()) == {15}
    assert (tables.first[1, 2], tables.last[1, 2]) == (0, 0)


def test_a_copy_that_applies_the_updates_equals_the_tables():
    tables = make()
    copy = [np.full_like(table, null) for table, null in zip(tables.tables, NULL, strict=True)]
    apply(copy, tables)
    tables.place(0, 1, 0, np.array([3, 4]))
    tables.place(1, 1, 0, np.array([8, 9]))
    apply(copy, tables)
    # a row that is freed and taken again between two steps
    tables.clear(0, 1)
    tables.clear(1, 1)
    tables.place(0, 1, 0, np.array([5]))
    tables.drop_before(1, np.array([1]), np.array([0]))
    apply(copy, tables)
    assert all(len(update.rows) == 0 for update in tables.take_updates())
