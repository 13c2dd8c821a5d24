import numpy as np
import pytest
from kv_driver import make_config
from page_pool_driver import call_fits
from page_pool_model import PoolModel

from girih.errors import CapacityError
from girih.kv import pool_state as s
from girih.kv.capacity import slabs_needed
from girih.kv.page_pool import PagePool
from girih.kv.specs.full_attention import FullAttentionRetention


@pytest.fixture
def make_model():
    models = []

    def make(*args, **options):
        models.append(PoolModel(*args, **options))
        return models[-1]

    yield make
    for model in models:
        model.check()
        model.drain()
        model.check()


def take(model, group, count):
    return [model.take(group, column) for column in range(count)]


def test_an_empty_pool_serves_exactly_what_the_planner_counted(make_model):
    for pages in ([8, 0], [0, 12], [5, 3], [4, 8], [3, 7]):
        groups = make_config(1, [(FullAttentionRetention(), 2), (FullAttentionRetention(), 3)]).groups
        model = make_model([4], [[2, 3]])
        assert model.fits(pages) == (slabs_needed(pages, groups) <= 4), pages
        if model.fits(pages):
            assert all(take(model, 1, pages[1]) + take(model, 0, pages[0]))


def test_a_page_that_does_not_fit_is_refused_and_changes_nothing(make_model):
    model = make_model([2], [[2, 2]])
    take(model, 0, 3)
    assert model.take(1) is None
    assert model.take(0) is not None


def test_the_fullest_slab_is_used_first(make_model):
    model = make_model([3], [[4]])
    pages = take(model, 0, 8)
    for page in pages[:3] + pages[4:5]:  # 1 page left in one slab, 3 in the other
        model.release(page)
    assert model.take(0) == pages[4]


def test_a_group_fills_its_own_slabs_before_it_borrows_one(make_model):
    model = make_model([3], [[2]])
    first, _ = take(model, 0, 2)
    model.cache(first)
    model.take(0)
    assert model.pool.counts()["slabs"].tolist() == [2]
    model.take(0)
    assert model.pool.counts()["slabs"].tolist() == [2]


def test_a_slab_returns_to_all_groups_with_its_last_page(make_model):
    model = make_model([1], [[2, 3]])
    first, second = take(model, 0, 2)
    model.release(first)
    assert model.pool.num_free_slabs == 0
    model.release(second)
    assert model.pool.num_free_slabs == 1
    assert all(take(model, 1, 3))


def test_a_tagged_page_outlives_its_references_until_it_is_needed(make_model):
    model = make_model([1], [[2]])
    first, second = take(model, 0, 2)
    model.cache(first)
    model.tag(second, 8, 9)
    model.pin(first)
    model.release(first)
    assert model.pool.counts()["cached"].tolist() == [1]
    assert model.take(0) == first
    assert [page.tags for page in model.evicted] == [(1, 0)]


def test_a_page_stays_as_long_as_somebody_refers_to_it(make_model):
    model = make_model([1], [[1]])
    page = model.take(0)
    model.pin(page)
    model.release(page)
    assert model.take(0) is None
    model.release(page)
    assert model.take(0) == page


def test_stage_classes_have_pools_of_their_own(make_model):
    model = make_model([2, 1], [[1, 2], [3]])
    assert take(model, 2, 3) == [7, 8, 9]
    assert model.take(2) is None
    assert model.fits([2, 0, 0])
    assert not model.fits([2, 1, 0])
    assert take(model, 0, 2) == [1, 2]
    assert model.pool.counts()["free_slabs"].tolist() == [0, 0]


def scattered(model, group=1, keep_every=4):
    """Fill the pool with pages of a group, and give up all but every fourth: one in each slab of four."""
    pages = take(model, group, 4 * model.pool.num_slabs())
    for column, page in enumerate(pages):
        if column % keep_every:
            model.release(page)
    model.drain()
    return pages[::keep_every]


def test_pages_move_together_to_make_room_for_another_group(make_model):
    model = make_model([3], [[1, 4]])
    scattered(model)
    assert model.pool.counts()["busy_slabs"].tolist() == [0, 3]
    assert take(model, 0, 3)[2] is None
    assert model.pool.counts()["busy_slabs"].tolist() == [2, 1]
    assert len(model.drain()) == 2


def test_a_page_that_moves_twice_before_a_step_is_moved_in_order(make_model):
    model = make_model([3], [[1, 4]])
    pages = take(model, 1, 12)
    model.drain()
    for page in pages[6:8] + pages[9:]:  # 4 pages in the first slab, 2 in the second, 1 in the third
        model.release(page)
    model.take(0)
    for page in pages[4:6] + pages[:1]:  # 3 in the first, the one that moved in the second
        model.release(page)
    model.take(0)
    (_, source, between), (_, again, destination) = model.drain()
    assert (source, again, destination) == (pages[8], between, pages[0])


def test_the_group_gives_way_that_has_the_fewest_bytes_to_move(make_model):
    model = make_model([4], [[1, 2, 4]])
    halves = take(model, 1, 4)
    quarters = take(model, 2, 8)
    for page in [halves[0], halves[2], *quarters[1:4], *quarters[5:]]:  # one page in each of two slabs, of both groups
        model.release(page)
    model.drain()
    model.take(0)
    assert [group for group, *_ in model.drain()] == [2]


@pytest.mark.parametrize(("budget_pages", "num_moved"), [(0, 1), (1, 2), (2, 3), (50, 3)])
def test_cached_pages_move_along_within_the_budget_and_are_evicted_beyond(make_model, budget_pages, num_moved):
    model = make_model([2], [[1, 8]], move_budget_bytes=budget_pages * 5040 // 8)
    pages = take(model, 1, 16)
    for page in pages[4:8] + pages[11:]:
        model.release(page)
    for page in pages[1:4] + pages[9:11]:  # R c c c . . . .     R c c . . . . .
        model.cache(page)
    model.drain()
    assert model.take(0) is not None
    assert len(model.drain()) == num_moved
    assert model.pool.counts()["cached"].tolist() == [0, 2 + num_moved]


def test_the_least_valuable_cached_pages_make_room_for_those_that_move(make_model):
    model = make_model([2], [[1, 4]])
    pages = take(model, 1, 8)
    for page, worth in zip(pages[1:4] + pages[5:], (10, 20, 2000, 4000, 30, 0), strict=True):
        model.cache(page, worth)
    model.drain()
    kept = {model.pages[pages[number]].content for number in (0, 3, 4, 5)}  # referenced, or worth most
    assert model.take(0) is not None
    assert {page.content for page in model.pages.values() if page.group == 1} == kept


def test_more_moves_than_a_step_makes_are_not_begun(make_model):
    model = make_model([3], [[1, 4]])
    scattered(model)
    model.take(0)
    model.state.counts[s.MAX_MOVES] = 0
    assert not call_fits(model.record, np.array([1, 0]))
    model.drain()
    assert call_fits(model.record, np.array([1, 0]))


def test_a_spare_page_is_a_free_one(make_model):
    model = make_model([2], [[2, 2]])
    assert model.take_spare(0, worth=0) is not None
    assert model.take_spare(1, worth=0) is not None
    assert model.take_spare(1, worth=0) is not None
    assert model.take_spare(1, worth=100_000) is None


def test_a_spare_page_may_replace_one_that_is_worth_less(make_model):
    model = make_model([1], [[2]])
    pages = take(model, 0, 2)
    for page in pages:
        model.cache(page, worth=100)
    assert model.take_spare(0, worth=50) is None
    assert model.take_spare(0, worth=100) is None
    assert model.take_spare(0, worth=200) is not None
    assert len(model.evicted) == 1


def test_a_spare_page_may_replace_a_slab_of_another_group(make_model):
    model = make_model([1], [[1, 4]])
    for page in take(model, 1, 4):
        model.cache(page, worth=100)
    assert model.take_spare(0, worth=100) is None  # the bytes of four pages for the tokens of one
    assert model.take_spare(0, worth=1000) is not None
    assert len(model.evicted) == 4


def test_a_spare_page_is_refused_where_it_would_need_a_move(make_model):
    model = make_model([3], [[1, 4]])
    scattered(model)
    assert model.fits([1, 0])
    assert model.take_spare(0, worth=100_000) is None


def test_a_pool_grows_and_shrinks_by_whole_slabs(make_model):
    model = make_model([1], [[2, 3]], max_slabs=[3])
    take(model, 0, 2)
    assert model.take(1) is None
    model.resize(0, 3)
    assert all(take(model, 1, 6))
    assert model.take(1) is None


def test_what_is_referenced_moves_out_of_the_slabs_that_go(make_model):
    model = make_model([4], [[1, 4]])
    pages = scattered(model)
    for column, page in enumerate(pages):
        model.tag(page, 1 + column)
    model.resize(0, 1)
    assert model.pool.counts()["referenced"].tolist() == [0, 4]
    model.drain()
    assert sorted(model.pages) == [5, 6, 7, 8]  # group 0 has pages 1 to 4


def test_what_is_cached_moves_out_only_into_free_room(make_model):
    model = make_model([3], [[2]])
    pages = take(model, 0, 6)
    model.release(pages[0])
    for page in pages[2:]:
        model.cache(page)
    kept = {model.pages[page].content for page in (pages[1], pages[4])}  # . R    c c    c c
    model.resize(0, 1)
    assert {page.content for page in model.pages.values()} == kept


def test_a_size_that_cannot_be_is_refused_in_one_line(make_model):
    model = make_model([3], [[2, 2]], max_slabs=[4])
    take(model, 0, 3)
    for count in (1, 5):
        with pytest.raises(CapacityError, match=f"^{count} slabs were asked for.* hold 2 .* made for 4; ask for"):
            model.resize(0, count)
    model.check()
    model.resize(0, 2)


def test_shrinking_tells_of_moves_after_each_slab():
    pool = PagePool([3], [0], [2], [8], 1)
    pool.resize(0, 1)
    assert pool.num_slabs() == 1
    model = PoolModel([4], [[1, 4]])
    scattered(model)
    with pytest.raises(AssertionError, match="nobody was told"):
        model.pool.resize(0, 1)


def test_freed_slabs_are_named_once_after_each_use(make_model):
    model = make_model([3, 2], [[1, 2], [1]])
    assert model.pool.take_freed_slabs().tolist() == []
    first, second = take(model, 0, 2)
    other = model.take(2)
    model.release(second)
    model.release(other)
    assert model.pool.take_freed_slabs(0).tolist() == [1]
    assert model.pool.take_freed_slabs(1).tolist() == [0]
    assert model.pool.take_freed_slabs(0).tolist() == []
    model.release(model.take(0))
    model.release(first)
    assert model.pool.take_freed_slabs(0).tolist() == [0, 1]


def test_a_slab_is_not_named_while_pages_have_yet_to_move_out_of_it(make_model):
    model = make_model([3], [[1, 4]])
    scattered(model)
    model.pool.take_freed_slabs()
    page = model.take(0)
    model.release(page)
    assert model.pool.take_freed_slabs().tolist() == []
    model.drain()
    assert len(model.pool.take_freed_slabs()) == 1


def test_a_model_without_caches_has_an_empty_pool():
    pool = PagePool([0], [], [], [], 1)
    assert pool.num_free_slabs == 0
    assert pool.counts()["free"].tolist() == []
    pool.evict_all()
    assert len(pool.take_freed_slabs()) == 0


def test_the_counts_are_of_this_moment(make_model):
    model = make_model([4], [[2, 3]])
    first, second, *_ = take(model, 0, 3)
    model.cache(first, worth=0)
    model.cache(second, worth=5)
    model.take(1)
    counts = model.pool.counts()
    expected = {"slabs": [2, 1], "busy_slabs": [1, 1], "free": [1, 2], "cached": [2, 0], "cold": [1, 0]}
    expected |= {"referenced": [1, 1], "free_slabs": [1]}
    assert {name: values.tolist() for name, values in counts.items()} == expected
    model.evict_all()
    assert np.array_equal(model.pool.counts()["cached"], [0, 0])
