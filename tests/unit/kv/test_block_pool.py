import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from kv_driver import make_config

from girih.kv.block_pool import BlockPool
from girih.kv.capacity import slabs_needed
from girih.kv.invariants import check_pool
from girih.kv.specs.full_attention import FullAttentionRetention


class Pool:
    """A pool by page ids, where a tag is just a number."""

    def __init__(self, num_slabs, pages_per_slab):
        self.pool = BlockPool(num_slabs, pages_per_slab)
        self.nothing = np.zeros(len(pages_per_slab), dtype=np.int64)
        self.refs = [np.zeros(num_slabs * k, dtype=np.int64) for k in pages_per_slab]
        self.slabs_of = [np.arange(num_slabs * k) // k for k in pages_per_slab]

    def take(self, *need, floor=None, promised=None):
        """Take pages; None if they are refused, else page ids per group."""
        need = np.array([need], dtype=np.int64)
        floor = self.nothing if floor is None else np.array(floor)
        promised = floor if promised is None else np.array(promised)
        possible = self.pool.slabs_short(need[0], floor) <= 0
        served, pages = self.pool.allocate(need, floor, promised)
        assert served == possible
        ids = [numbers - first for numbers, first in zip(pages, self.pool.first_page, strict=True)]
        for group, taken in enumerate(ids):
            assert len(taken) == served * need[0, group]
            assert (self.refs[group][taken] == 0).all(), "a page in use is handed out"
            self.refs[group][taken] += 1
        self.check()
        return [taken.tolist() for taken in ids] if served else None

    def tag(self, group, ids):
        self.pool.tags[self.numbers(group, ids)] = 1

    def pin(self, group, ids):
        self.pool.pin(group, self.numbers(group, ids))
        self.refs[group][ids] += 1
        self.check()

    def release(self, group, ids, warm=True):
        self.pool.release(group, self.numbers(group, ids), np.full(len(ids), warm))
        self.refs[group][ids] -= 1
        self.check()

    def cache(self, group, ids, warm=True):
        self.tag(group, ids)
        self.release(group, ids, warm)

    def evicted(self):
        return [int(page) for page, _ in self.pool.take_evicted()]

    def numbers(self, group, ids):
        return (np.array(ids, dtype=np.int64) + self.pool.first_page[group]).astype(np.int32)

    def check(self):
        check_pool(self.pool, self.refs)


def test_an_empty_pool_serves_exactly_what_the_planner_counted():
    for pages in ([8, 0], [0, 12], [5, 3], [4, 8], [3, 7]):
        groups = make_config(1, [(FullAttentionRetention(), 2), (FullAttentionRetention(), 3)]).groups
        fits = slabs_needed(pages, groups) <= 4
        assert (Pool(4, [2, 3]).take(*pages) is not None) == fits, pages


def test_what_is_refused_changes_nothing():
    pool = Pool(2, [2, 2])
    (held, _) = pool.take(2, 0)
    pool.cache(0, [held[0]])
    assert pool.take(0, 3) is None
    assert pool.evicted() == []
    assert pool.take(0, 2) is not None


def test_sequences_are_served_in_order_up_to_the_first_that_does_not_fit():
    pool = BlockPool(3, [2])
    served, (pages,) = pool.allocate(np.array([[2], [3], [2], [1]]), np.zeros(1, int), np.zeros(1, int))
    assert (served, len(pages)) == (2, 5)


def test_the_fullest_slab_is_used_first():
    pool = Pool(3, [4])
    (ids,) = pool.take(8)
    pool.release(0, [ids[0], ids[1], ids[2], ids[4]])  # 1 page left in one slab, 3 in the other
    (more,) = pool.take(1)
    assert more == [ids[4]]


def test_a_slab_returns_to_all_groups_with_its_last_page():
    pool = Pool(1, [2, 3])
    (ids, _) = pool.take(2, 0)
    pool.release(0, ids[:1])
    assert pool.pool.num_free_slabs == 0
    assert pool.take(0, 1) is None
    pool.release(0, ids[1:])
    assert pool.pool.num_free_slabs == 1
    assert pool.take(0, 3) is not None


def test_a_tagged_page_outlives_its_references_until_it_is_needed():
    pool = Pool(1, [2])
    (ids,) = pool.take(2)
    pool.cache(0, ids)
    assert pool.pool.counts()["cached"].tolist() == [2]
    pool.pin(0, ids[:1])
    assert pool.take(1) == [[ids[1]]]
    assert pool.evicted() == [ids[1] + 1]


def test_free_slabs_are_used_before_anything_is_evicted():
    pool = Pool(3, [2])
    (ids,) = pool.take(2)
    pool.cache(0, ids)
    pool.take(4)
    assert pool.evicted() == []
    pool.take(1)
    assert len(pool.evicted()) == 1


def test_cold_pages_go_before_warm_ones_and_older_before_newer():
    pool = Pool(2, [4])
    (ids,) = pool.take(8)
    pool.cache(0, [ids[6]])
    pool.cache(0, [ids[3], ids[2]], warm=False)
    pool.cache(0, [ids[5]])
    order = [pool.take(1)[0][0] for _ in range(4)]
    assert order == [ids[3], ids[2], ids[6], ids[5]]
    assert pool.evicted() == [page + 1 for page in order]
    assert pool.take(1) is None


def test_another_groups_idle_slab_goes_when_it_is_older_than_the_groups_own_pages():
    pool = Pool(2, [2, 2])
    (mine, theirs) = pool.take(2, 2)
    pool.cache(1, theirs)
    pool.cache(0, mine[:1])
    pool.take(1, 0)
    assert len(pool.evicted()) == 2
    assert pool.pool.counts()["slabs"].tolist() == [2, 0]


def test_a_groups_own_page_goes_when_it_is_older_than_another_groups_idle_slab():
    pool = Pool(2, [2, 2])
    (mine, theirs) = pool.take(2, 2)
    pool.cache(0, mine[:1])
    pool.cache(1, theirs)
    assert pool.take(1, 0)[0] == mine[:1]
    assert len(pool.evicted()) == 1
    assert pool.pool.counts()["slabs"].tolist() == [1, 1]


def test_slabs_that_are_promised_are_not_borrowed_for_the_sake_of_cached_pages():
    for promised, slabs in ([0, 0], 2), ([1, 2], 1):
        pool = Pool(3, [2, 2])
        (ids, _) = pool.take(2, 0)
        pool.cache(0, ids[:1])
        pool.take(1, 0, promised=promised)
        assert pool.pool.counts()["slabs"][0] == slabs


def test_a_floor_keeps_slabs_for_other_groups():
    pool = Pool(3, [2, 2])
    assert pool.take(3, 0, floor=[1, 2]) is None
    assert pool.take(2, 0, floor=[1, 2]) is not None
    assert pool.take(2, 0) is not None


def test_evict_all_leaves_what_is_referenced():
    pool = Pool(2, [2, 3])
    (mine, theirs) = pool.take(2, 3)
    pool.cache(0, mine[:1])
    pool.cache(1, theirs)
    pool.pool.evict_all()
    assert len(pool.evicted()) == 4
    assert pool.pool.counts()["cached"].tolist() == [0, 0]
    assert pool.pool.num_free_slabs == 1
    pool.check()


@pytest.mark.parametrize(("array", "element"), [("pages", 3), ("tags", 2), ("slabs", 10), ("groups", 1), ("counts", 3)])
def test_check_notices_damage(array, element):
    pool = Pool(2, [2])
    pool.take(1)
    getattr(pool.pool.state, array).flat[element] += 1
    with pytest.raises(AssertionError):
        pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Random calls against a model that knows each page's references, and which pages are tagged."""

    @initialize(num_slabs=st.integers(1, 8), pages_per_slab=st.lists(st.integers(1, 5), min_size=1, max_size=3))
    def start(self, num_slabs, pages_per_slab):
        self.pool = Pool(num_slabs, pages_per_slab)
        self.held = []  # (group, id), once per reference
        self.cached = set()

    def forget_evicted(self):
        evicted = self.pool.evicted()
        assert len(set(evicted)) == len(evicted)
        for number in evicted:
            group = int(np.searchsorted(self.pool.pool.first_page, number, side="right")) - 1
            self.cached.remove((group, number - int(self.pool.pool.first_page[group])))

    @rule(need=st.lists(st.integers(0, 7), min_size=3, max_size=3), promised=st.integers(0, 3))
    def take(self, need, promised):
        num_groups = len(self.pool.refs)
        busy = [np.unique(self.pool.slabs_of[group][self.pool.refs[group] > 0]) for group in range(num_groups)]
        total = 0
        for group in range(num_groups):
            per_slab = len(self.pool.refs[group]) // self.pool.pool.num_slabs
            inside = len(busy[group]) * per_slab - np.count_nonzero(self.pool.refs[group])
            total += len(busy[group]) + max(0, -(-(need[group] - inside) // per_slab))
        taken = self.pool.take(*need[:num_groups], floor=[0] * num_groups, promised=[promised] * num_groups)
        assert (taken is not None) == (total <= self.pool.pool.num_slabs)
        self.forget_evicted()
        for group, ids in enumerate(taken or ()):
            assert not self.cached & {(group, page) for page in ids}
            self.held += [(group, page) for page in ids]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), warm=st.booleans(), tag=st.booleans())
    def release(self, data, warm, tag):
        group, _ = data.draw(st.sampled_from(self.held))
        mine = [entry for entry in self.held if entry[0] == group]
        chosen = data.draw(st.lists(st.sampled_from(mine), min_size=1, unique=True))
        ids = [page for _, page in chosen]
        if tag:
            self.pool.tag(group, ids)
        tagged = {page for page in ids if self.pool.pool.tags[self.pool.numbers(group, [page])[0]]}
        self.pool.release(group, ids, warm)
        for entry in chosen:
            self.held.remove(entry)
            if entry[1] in tagged and entry not in self.held:
                self.cached.add(entry)

    @precondition(lambda self: self.held or self.cached)
    @rule(data=st.data())
    def pin(self, data):
        group, page = data.draw(st.sampled_from(sorted(self.cached) + self.held))
        self.pool.pin(group, [page])
        self.cached.discard((group, page))
        self.held.append((group, page))

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def evict(self, data):
        group, page = data.draw(st.sampled_from(sorted(self.cached)))
        self.pool.pool.evict(group, self.pool.numbers(group, [page]))
        self.forget_evicted()
        assert (group, page) not in self.cached
        self.pool.check()

    @rule()
    def evict_all(self):
        self.pool.pool.evict_all()
        self.forget_evicted()
        assert not self.cached
        self.pool.check()


quiet = {"deadline": None, "suppress_health_check": list(HealthCheck)}


class TestPool(PoolMachine.TestCase):
    settings = settings(max_examples=60, stateful_step_count=40, derandomize=True, **quiet)


@pytest.mark.soak
class TestPoolSoak(PoolMachine.TestCase):
    settings = settings(max_examples=4000, stateful_step_count=80, **quiet)
