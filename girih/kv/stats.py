"""`CacheStats`: the cache's counters and its state now, as numbers."""

from __future__ import annotations

from dataclasses import dataclass

from girih.kv import state as s
from girih.kv.page_pool import PagePool
from girih.kv.state import ManagerState


@dataclass(frozen=True)
class CacheStats:
    """The cache's counters since start-up and its state now.

    Args:
        tokens_looked_up: tokens of all admitted requests that were allowed to read the cache.
        tokens_hit: how many of them were reused.
        tokens_lost_to_state: tokens that could have been reused too, had a recurrent state been kept behind them.
        tokens_lost_to_window: the same for blocks of a window or chunk.
        pages_evicted: cached pages given up for others.
        pages_moved: pages that changed place to empty a slab.
        checkpoints: recurrent states kept within prompts.
        checkpoints_denied: those for which there was no page to spare.
        num_free_slabs: slabs that no group has borrowed.
        slabs: per group, borrowed slabs.
        free_pages: per group, pages of its slabs that hold nothing.
        cached_pages: per group, pages that only the prefix cache holds.
        cold_pages: per group, cached pages that no later prompt is likely to start from; they go first.
        referenced_pages: per group, pages in block tables.
    """

    tokens_looked_up: int
    tokens_hit: int
    tokens_lost_to_state: int
    tokens_lost_to_window: int
    pages_evicted: int
    pages_moved: int
    checkpoints: int
    checkpoints_denied: int
    num_free_slabs: int
    slabs: tuple[int, ...]
    free_pages: tuple[int, ...]
    cached_pages: tuple[int, ...]
    cold_pages: tuple[int, ...]
    referenced_pages: tuple[int, ...]

    @classmethod
    def of(cls, state: ManagerState, pool: PagePool) -> CacheStats:
        """Read the numbers of a manager."""
        counts = {name: tuple(values.tolist()) for name, values in pool.counts().items()}
        counters = state.stats.tolist()
        return cls(
            tokens_looked_up=counters[s.LOOKED_UP],
            tokens_hit=counters[s.HIT],
            tokens_lost_to_state=counters[s.LOST_TO_STATE],
            tokens_lost_to_window=counters[s.LOST_TO_WINDOW],
            pages_evicted=counters[s.PAGES_EVICTED],
            pages_moved=counters[s.PAGES_MOVED],
            checkpoints=counters[s.CHECKPOINTS],
            checkpoints_denied=counters[s.CHECKPOINTS_DENIED],
            num_free_slabs=sum(counts["free_slabs"]),
            slabs=counts["slabs"],
            free_pages=counts["free"],
            cached_pages=counts["cached"],
            cold_pages=counts["cold"],
            referenced_pages=counts["referenced"],
        )
