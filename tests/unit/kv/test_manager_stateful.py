"""Random add, step, abort, preempt and free against a memory that knows which tokens each page must hold."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_driver import KVDriver, make_config

from girih.kv.specs.full_attention import FullAttentionRetention
from girih.kv.specs.sliding_window import SlidingWindowRetention

MAX_MODEL_LEN = 48

retentions = st.one_of(
    st.just(FullAttentionRetention()), st.builds(SlidingWindowRetention, st.sampled_from([1, 2, 4, 5, 9, 12, 17]))
)
groups = st.lists(st.tuples(retentions, st.integers(1, 6)), min_size=1, max_size=3)


class ManagerMachine(RuleBasedStateMachine):
    """Requests with equal beginnings in a pool that holds one of them up to a few."""

    @initialize(
        groups=groups, block_size=st.sampled_from([1, 3, 4]), slack=st.integers(0, 12), caching=st.integers(0, 5)
    )
    def start(self, groups, block_size, slack, caching):
        plan = make_config(1, groups, MAX_MODEL_LEN, block_size)
        lone = sum(-(-kept.peak_blocks(MAX_MODEL_LEN, block_size) // k) for kept, k in groups)
        plan = make_config(lone + slack, groups, MAX_MODEL_LEN, block_size)
        self.driver = KVDriver(plan, max_num_seqs=3, enable_prefix_caching=caching > 0)
        self.waiting = []

    @rule(
        family=st.integers(0, 1), length=st.integers(1, 40), branch=st.integers(1, 40), salt=st.sampled_from(["", "x"])
    )
    def add(self, family, length, branch, salt):
        tokens = [family * 100 + i if i < branch else 1000 + branch + i for i in range(length)]
        self.driver.add(tokens, salt=salt, read_cache=branch % 7 > 0)

    @precondition(lambda self: self.waiting)
    @rule()
    def resume(self):
        if self.driver.add(self.waiting[-1], read_cache=bool(self.driver.rows)) is not None:
            self.waiting.pop()

    @precondition(lambda self: self.driver.rows)
    @rule(chunk=st.sampled_from([1, 2, 5, 16, 100]), token=st.integers(0, 2), repeat=st.integers(1, 6))
    def step(self, chunk, token, repeat):
        for _ in range(repeat):
            for row in [row for row, tokens in self.driver.rows.items() if len(tokens) >= MAX_MODEL_LEN]:
                self.driver.free(row)
            if self.driver.rows:
                self.waiting += self.driver.step(chunk, lambda row: token)

    @precondition(lambda self: self.driver.rows)
    @rule(which=st.integers(0, 10))
    def abort(self, which):
        self.driver.free(list(self.driver.rows)[which % len(self.driver.rows)])

    @precondition(lambda self: self.driver.rows)
    @rule(which=st.integers(0, 10))
    def preempt(self, which):
        row = list(self.driver.rows)[which % len(self.driver.rows)]
        self.waiting.append(self.driver.rows[row])
        self.driver.free(row)

    @rule()
    def reset(self):
        assert self.driver.manager.reset_prefix_cache() == (not self.driver.rows)
        self.driver.manager.check()

    @invariant()
    def all_pages_are_somewhere(self):
        stats = self.driver.manager.stats()
        assert stats.num_free_slabs + sum(stats.slabs) == self.driver.config.num_slabs
        if not self.driver.rows:
            assert sum(stats.referenced_pages) == 0

    def teardown(self):
        for row in list(self.driver.rows):
            self.driver.free(row)
        assert self.driver.manager.reset_prefix_cache()
        assert self.driver.manager.stats().num_free_slabs == self.driver.config.num_slabs
        self.driver.manager.check()


quiet = {"deadline": None, "suppress_health_check": list(HealthCheck)}


class TestManager(ManagerMachine.TestCase):  # case 75
    settings = settings(max_examples=60, stateful_step_count=30, derandomize=True, **quiet)


@pytest.mark.soak
class TestManagerSoak(ManagerMachine.TestCase):  # case 75: up to 180,000 steps
    settings = settings(max_examples=3000, stateful_step_count=60, **quiet)
