"""Which cached page goes first. Slabs of 5,040 bytes: with k pages per slab a page has 5040 / k bytes."""

import pytest
from page_pool_model import PoolModel


def cached(model, group, *worths):
    """Take pages and cache them in this order, each with its worth."""
    pages = [model.take(group) for _ in worths]
    for page, worth in zip(pages, worths, strict=True):
        model.cache(page, worth)
    return [model.pages[page].content for page in pages]


def evict(model, group, count=1):
    """Take pages, and return what each of them evicts."""
    gone = []
    for _ in range(count):
        assert model.take(group) is not None
        gone += [page.content for page in model.evicted]
    model.check()
    return gone


def find(model, content):
    return next(number for number, page in model.pages.items() if page.content == content)


def test_of_pages_that_are_worth_the_same_the_one_cached_first_goes_first():
    model = PoolModel([1], [[4]])
    assert evict(model, 0, 0) == []
    pages = cached(model, 0, 16, 16, 16, 16)
    assert evict(model, 0, 4) == pages


def test_what_is_worth_nothing_goes_before_everything_however_old():
    model = PoolModel([1], [[4]])
    first, second, third, fourth = cached(model, 0, 16, 0, 1, 0)
    assert evict(model, 0, 4) == [second, fourth, third, first]
    assert model.pool.counts()["cold"].tolist() == [0]


def test_what_saves_more_tokens_stays_longer():
    model = PoolModel([1], [[4]])
    first, second, third, fourth = cached(model, 0, 1000, 16, 100_000, 250)
    assert evict(model, 0, 4) == [second, fourth, first, third]


def test_a_page_that_was_found_again_counts_for_more():
    model = PoolModel([1], [[4]])
    first, *rest = cached(model, 0, 16, 16, 16, 16)
    model.pin(find(model, first))
    model.release(find(model, first), 16)
    for _ in range(2):
        model.pin(find(model, rest[0]))
    for _ in range(2):
        model.release(find(model, rest[0]), 16)
    assert evict(model, 0, 4) == [rest[1], rest[2], first, rest[0]]


def test_a_page_that_nobody_finds_again_sinks_however_much_it_is_worth():
    model = PoolModel([1], [[4]])
    (valuable,) = cached(model, 0, 64)
    gone = []
    for _ in range(20):
        page = model.take(0)
        gone += [page.content for page in model.evicted]
        model.cache(page, 16)
    assert valuable in gone[4:]


def test_pages_of_different_size_compare_by_the_byte():
    for worth, goes_first in ((100, "large"), (10_000, "small")):
        model = PoolModel([2], [[1, 10]])
        (large,) = cached(model, 0, worth)
        small = cached(model, 1, *[100] * 10)
        gone = evict(model, 1)
        assert gone == ([large] if goes_first == "large" else small[:1])


def test_a_slab_in_which_nothing_is_referenced_goes_whole_if_its_pages_are_worth_less():
    model = PoolModel([2], [[4, 2]])
    slab = cached(model, 0, 10, 20, 30, 0)
    cached(model, 1, 1000, 1000)
    assert sorted(evict(model, 1)) == slab
    assert evict(model, 1) == []


def test_what_a_slab_is_worth_is_counted_by_all_of_its_bytes():
    # one valuable page in a slab that is otherwise free does not hold the slab
    model = PoolModel([2], [[10, 2]])
    pages = [model.take(0) for _ in range(10)]
    valuable = model.pages[pages[0]].content
    model.cache(pages[0], 200)
    for page in pages[1:]:
        model.release(page)
    cached(model, 1, 400, 400)
    assert evict(model, 1) == [valuable]


def test_a_group_takes_only_one_page_of_its_own_idle_slab():
    model = PoolModel([1], [[3]])
    pages = cached(model, 0, 16, 16, 16)
    assert evict(model, 0) == pages[:1]


def busy_with_cached(model, group, worth):
    """Leave one referenced page in each of two slabs of four, and three cached ones."""
    pages = [model.take(group) for _ in range(8)]
    for page in pages[1:4] + pages[5:]:
        model.cache(page, worth)


@pytest.mark.parametrize(("worth", "gives_way"), [(0, True), (16, True), (1000, False)])
def test_another_group_gives_a_slab_if_a_slab_full_of_its_pages_is_worth_less_than_half(worth, gives_way):
    model = PoolModel([3], [[1, 4]])
    busy_with_cached(model, 1, worth)
    cached(model, 0, 1000)
    gone = evict(model, 0)
    assert len(gone) == (4 if gives_way else 1)
    assert len(model.drain()) == (1 if gives_way else 0)  # the referenced page of one slab


def test_another_group_does_not_give_a_slab_beyond_the_budget_for_moves():
    model = PoolModel([3], [[1, 4]], move_budget_bytes=4 * 5040 // 4 - 1)
    busy_with_cached(model, 1, 0)
    cached(model, 0, 1000)
    assert len(evict(model, 0)) == 1
    assert not len(model.drain())


def test_evicting_on_demand_leaves_the_rest_in_order():
    model = PoolModel([1], [[4]])
    pages = cached(model, 0, 16, 16, 16, 16)
    model.evict(find(model, pages[1]))
    assert evict(model, 0, 4) == [pages[0], *pages[2:]]


def test_a_page_alone_in_its_slab_goes_also_where_it_is_not_among_the_oldest():
    model = PoolModel([12], [[1, 1]])
    model.take(1)
    *_, cheap = cached(model, 1, *[10_000] * 9, 1)
    cached(model, 0, 100_000)
    model.drain()
    assert evict(model, 0) == [cheap]
    model.drain()
