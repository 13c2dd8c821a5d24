"""A full pool stays usable while requests of all lengths come and go: pages move together, they don't lie scattered."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from page_pool_driver import call_fits, call_release, call_take

from girih.kv import pool_state as s
from girih.kv.compiled import Record
from girih.kv.page_pool import PagePool

SLAB_BYTES = 37_000
STATES, BLOCKS = 0, 1


@dataclass(eq=False)
class Request:
    """One state, a growing number of blocks; by group, their page numbers."""

    num_blocks: int
    pages: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))


class Churn:
    """Requests in a pool whose slabs hold one state or 37 blocks.

    Args:
        caching: what a request leaves behind stays cached.
        seed: of the lengths.
    """

    def __init__(self, *, caching: bool, seed: int):
        self.pool = PagePool([60], [0, 0], [1, 37], [SLAB_BYTES, SLAB_BYTES // 37], 1)
        self.record, self.caching, self.random = Record(self.pool.state), caching, np.random.default_rng(seed)
        self.requests: list[Request] = []
        self.bytes_moved = 0
        self.usable: list[float] = []

    def step(self):
        """Let every request take a block, end those that are long enough, and let new ones in."""
        for request in self.requests[:]:
            while request in self.requests and not self.take(request, BLOCKS):
                self.end(self.requests[-1])  # no room: the newest one is preempted
            if request in self.requests and len(request.pages[BLOCKS]) >= request.num_blocks:
                self.end(request)
        full = False
        while not full:
            request = Request(num_blocks=int(self.random.lognormal(3.5, 1.2)) + 1)
            self.requests.append(request)
            full = not all(self.take(request, group) for group in (STATES, *[BLOCKS] * min(8, request.num_blocks)))
            if full:
                self.end(request)
        for group, *_ in self.pool.take_moves().tolist():
            self.bytes_moved += int(self.pool.state.groups[group, s.PAGE_BYTES])
        counts, groups = self.pool.counts(), self.pool.state.groups
        held = counts["slabs"] * groups[:, s.PAGES_PER_SLAB] - counts["cached"]
        page_bytes = groups[:, s.PAGE_BYTES]
        self.usable.append((counts["referenced"] * page_bytes).sum() / (held * page_bytes).sum())

    def take(self, request: Request, group: int) -> bool:
        if not call_fits(self.record, np.array([group == STATES, group == BLOCKS], dtype=np.int64)):
            return False
        before = self.pool.state.counts[s.MOVES]
        page = call_take(self.record, group, len(request.pages[group]))
        assert page > 0
        self.pool.take_evicted()
        for moved, source, destination in self.pool.state.moves[before : self.pool.state.counts[s.MOVES]].tolist():
            mine = [request.pages[moved] for request in self.requests if source in request.pages[moved]]
            for pages in mine:
                pages[pages.index(source)] = destination
        request.pages[group].append(page)
        return True

    def end(self, request: Request) -> None:
        self.requests.remove(request)
        for group, pages in enumerate(request.pages):
            for page in pages:
                self.pool.state.tags[page, 0] = self.caching
                call_release(self.record, group, page, 16)


def check_churn(*, caching: bool, seed: int, num_steps: int) -> None:
    churn = Churn(caching=caching, seed=seed)
    for _ in range(num_steps):
        churn.step()
    assert min(churn.usable[num_steps // 3 :]) >= 0.95
    assert churn.bytes_moved < SLAB_BYTES * num_steps


@pytest.mark.parametrize("caching", [False, True])
def test_a_saturated_pool_of_states_and_blocks_stays_usable(caching):
    check_churn(caching=caching, seed=1, num_steps=60)


@pytest.mark.soak
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a_saturated_pool_stays_usable_for_long(caching, seed):
    check_churn(caching=caching, seed=seed, num_steps=1000)
