"""Random add, step, guess, abort, preempt and resize of requests in a small pool of any mix of groups."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_driver import KVDriver, make_config

from girih.kv.specs.chunked_local import ChunkedLocalRetention
from girih.kv.specs.cross_attention import CrossAttentionRetention
from girih.kv.specs.full_attention import FullAttentionRetention
from girih.kv.specs.sliding_window import SlidingWindowRetention
from girih.kv.specs.state import StateRetention

MAX_MODEL_LEN = 48
LOOKAHEAD = 3

trims = st.sampled_from([0, 0, 0, 1])
retentions = st.one_of(
    st.builds(FullAttentionRetention, hit_trim_tokens=trims),
    st.builds(SlidingWindowRetention, st.sampled_from([1, 2, 4, 5, 9, 12, 17]), hit_trim_tokens=trims),
    st.builds(ChunkedLocalRetention, st.sampled_from([3, 8, 12])),
    st.just(StateRetention()),
)
# the block size in units
groups = st.lists(st.tuples(retentions, st.integers(1, 6), st.sampled_from([1, 1, 2, 3])), min_size=1, max_size=4)


class ManagerMachine(RuleBasedStateMachine):
    """Requests with equal beginnings in a pool that holds one of them up to a few."""

    check_every = 4  # a check costs more than a step
    make_driver = KVDriver

    @initialize(
        groups=groups,
        unit=st.sampled_from([1, 2, 4]),
        lookahead=st.sampled_from([0, 0, 0, LOOKAHEAD]),
        slack=st.integers(0, 12),
        options=st.sampled_from(["", "", "", "", "no caching", "encoder", "two pools"]),
    )
    def start(self, groups, unit, lookahead, slack, options):
        groups = [(kept, k, unit * blocks) for kept, k, blocks in groups]
        if options == "encoder":
            groups.append((CrossAttentionRetention(7), 2, unit))
        parts = [groups[:1], groups[1:]] if options == "two pools" and len(groups) > 1 else [groups]
        self.least = [
            sum(-(-kept.peak_blocks(MAX_MODEL_LEN, size, lookahead) // k) for kept, k, size in part) for part in parts
        ]
        plans = [
            make_config(
                least + slack, part, MAX_MODEL_LEN, num_lookahead_tokens=lookahead, stage_class=number,
                first_group=number * len(parts[0]),
            )
            for number, (part, least) in enumerate(zip(parts, self.least, strict=True))
        ]  # fmt: skip
        self.driver = self.make_driver(
            plans, max_num_seqs=3, check=False, enable_prefix_caching=options != "no caching", state_checkpoint_tokens=5
        )
        self.lookahead = lookahead
        self.num_slabs = [plan.num_slabs for plan in plans]
        self.waiting = []
        self.calls = 0

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

    @precondition(lambda self: self.lookahead and self.driver.rows)
    @rule(num_drafts=st.integers(1, LOOKAHEAD), right=st.integers(0, LOOKAHEAD))
    def guess(self, num_drafts, right):
        manager = self.driver.manager
        rows = [
            row
            for row, tokens in self.driver.rows.items()
            if len(tokens) < MAX_MODEL_LEN - LOOKAHEAD and manager.num_computed_tokens[row] == len(tokens) - 1
        ]
        rows = np.array(rows[: self.driver.reserve(rows, [1] * len(rows))], dtype=np.int64)
        manager.publish(rows, manager.num_computed_tokens[rows] + 1)
        self.driver.compute(
            rows,
            np.ones(len(rows), dtype=np.int64),
            sample=lambda row: 1,
            accepted={row: 1 + min(num_drafts, right) for row in rows.tolist()},
            drafts={row: [2] * num_drafts for row in rows.tolist()},
        )

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

    @rule(which=st.integers(0, 1), spare=st.integers(0, 12))
    def resize(self, which, spare):
        which %= len(self.least)
        plan, manager = self.driver.configs[which], self.driver.manager
        held = manager.stats().referenced_pages[plan.first_group :]
        needed = sum(-(-pages // group.pages_per_slab) for pages, group in zip(held, plan.groups, strict=False))
        num_slabs = min(plan.num_slabs, max(needed, self.least[which]) + spare)
        manager.resize(num_slabs, which)
        self.num_slabs[which] = num_slabs

    @rule()
    def reset(self):
        assert self.driver.manager.reset_prefix_cache() == (not self.driver.rows)

    @invariant()
    def all_pages_are_somewhere(self):
        stats = self.driver.manager.stats()
        assert stats.num_free_slabs + sum(stats.slabs) == sum(self.num_slabs)
        if not self.driver.rows:
            assert sum(stats.referenced_pages) == 0
        self.calls += 1
        if self.calls % self.check_every == 0:
            self.driver.manager.check()

    def teardown(self):
        for row in list(self.driver.rows):
            self.driver.free(row)
        self.driver.manager.check()
        assert self.driver.manager.reset_prefix_cache()
        assert self.driver.manager.stats().num_free_slabs == sum(self.num_slabs)
        self.driver.manager.check()
