"""Random calls of the pool beside `PoolModel`, which checks each of them."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from page_pool_model import PoolModel

from girih.errors import CapacityError

worths = st.sampled_from([0, 1, 16, 17, 300, 100_000])
stage_class = st.tuples(st.integers(1, 7), st.lists(st.sampled_from([1, 2, 3, 4, 7, 20, 70]), min_size=1, max_size=3))


class PoolMachine(RuleBasedStateMachine):
    """A few slabs, so that every call finds them full, scattered or idle."""

    @initialize(
        classes=st.lists(stage_class, min_size=1, max_size=2),
        spare=st.integers(0, 3),
        budget=st.sampled_from([0, 3000, 1 << 30]),
    )
    def start(self, classes, spare, budget):
        num_slabs = [count for count, _ in classes]
        self.model = PoolModel(
            num_slabs,
            [groups for _, groups in classes],
            max_slabs=[count + spare for count in num_slabs],
            move_budget_bytes=budget,
        )
        self.num_groups = len(self.model.per_slab)
        self.next_tag = 1

    @rule(data=st.data(), fill=st.booleans())
    def take(self, data, fill):
        k = self.model.per_slab
        extra = [data.draw(st.integers(0, 2 * k[group] + 1 if fill else 2)) for group in range(self.num_groups)]
        if self.model.fits(extra):
            order = [group for group, count in enumerate(extra) for _ in range(count)]
            for group in data.draw(st.permutations(order)) if len(order) < 20 else order:
                assert self.model.take(group, column=self.next_tag % 50) is not None

    @rule(data=st.data(), worth=worths)
    def take_spare(self, data, worth):
        self.model.take_spare(data.draw(st.integers(0, self.num_groups - 1)), worth)

    @precondition(lambda self: self.held())
    @rule(data=st.data(), worth=worths, num_tags=st.integers(0, 2))
    def release_some(self, data, worth, num_tags):
        self.release(data.draw(st.sampled_from(self.held())), worth, num_tags)

    @precondition(lambda self: self.held())
    @rule(data=st.data(), every=st.integers(1, 4), worths=st.lists(worths, min_size=1, max_size=3))
    def release_many(self, data, every, worths):
        group = self.model.pages[data.draw(st.sampled_from(self.held()))].group
        for i, page in enumerate(self.model.of(group, cached=False)[::every]):
            self.release(page, worths[i % len(worths)], num_tags=data.draw(st.integers(0, 1)))

    @precondition(lambda self: self.model.pages)
    @rule(data=st.data())
    def pin(self, data):
        page = data.draw(st.sampled_from(sorted(self.model.pages)))
        if self.model.pages[page].refs or self.model.one_more(self.model.pages[page].group):
            self.model.pin(page)

    @precondition(lambda self: self.cached())
    @rule(data=st.data())
    def evict(self, data):
        self.model.evict(data.draw(st.sampled_from(self.cached())))

    @rule(data=st.data())
    def resize(self, data):
        pool = self.model.pool
        which = data.draw(st.integers(0, len(pool.max_slabs) - 1))
        count = data.draw(st.integers(0, pool.max_slabs[which]))
        try:
            self.model.resize(which, count)
            assert pool.num_slabs(which) == count
        except CapacityError:
            model, mine = self.model, [g for g in range(self.num_groups) if self.model.class_of[g] == which]
            assert sum(-(-model.referenced[group] // model.per_slab[group]) for group in mine) > count

    @rule()
    def drain(self):
        self.model.drain()

    @rule()
    def evict_all(self):
        self.model.evict_all()

    @invariant()
    def all_counts_and_rings_agree(self):
        self.model.check()

    def teardown(self):
        self.model.drain()
        for page in self.held():
            while page in self.model.pages and self.model.pages[page].refs:
                self.release(page, worth=16, num_tags=0)
        self.model.evict_all()
        assert self.model.pool.num_free_slabs == sum(
            self.model.pool.num_slabs(which) for which in range(len(self.model.pool.max_slabs))
        )

    def held(self):
        return sorted(number for number, page in self.model.pages.items() if page.refs)

    def cached(self):
        return sorted(number for number, page in self.model.pages.items() if not page.refs)

    def release(self, page, worth, num_tags):
        if num_tags and not self.model.pages[page].tags[0]:
            self.model.tag(page, *range(self.next_tag, self.next_tag + num_tags))
            self.next_tag += num_tags
        self.model.release(page, worth)


quiet = {"deadline": None, "suppress_health_check": list(HealthCheck)}


class TestPagePool(PoolMachine.TestCase):
    settings = settings(max_examples=60, stateful_step_count=30, derandomize=True, **quiet)


@pytest.mark.soak
class TestPagePoolSoak(PoolMachine.TestCase):
    settings = settings(max_examples=3000, stateful_step_count=80, **quiet)
