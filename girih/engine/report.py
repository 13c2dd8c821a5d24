"""What the engine says about itself: how it started, and what it is doing."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from girih.kv.stats import CacheStats
from girih.sched.scheduler import Scheduler

logger = logging.getLogger(__name__)


@dataclass
class StartupReport:
    """How long each phase of bring-up took, and what memory was found.

    Args:
        phases_s: phase -> seconds, in order; together they are the start-up time.
        memory: what each worker reported, by rank; empty when the KV cache's size was given.
    """

    phases_s: dict[str, float] = field(default_factory=dict)
    memory: list[Any] = field(default_factory=list)

    @property
    def total_s(self) -> float:
        """Return the start-up time in seconds."""
        return sum(self.phases_s.values())

    def note_memory(self, reports: list[Any]) -> None:
        """Keep and log what each worker reported."""
        self.memory = reports
        for report in reports:
            logger.info("%s", report.describe())
            for warning in report.warnings:
                logger.warning("%s", warning)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time and log one phase."""
        logger.debug("%s ...", name)
        start = time.perf_counter()
        yield
        self.phases_s[name] = self.phases_s.get(name, 0.0) + time.perf_counter() - start
        logger.info("%s: %.3f s", name, self.phases_s[name])


@dataclass(frozen=True)
class EngineStats:
    """What the engine is doing.

    Args:
        num_running: requests that hold a row and pages.
        num_waiting: requests that wait, new or preempted.
        waiting_by_reason: how many of them the last step left waiting for pages ("capacity"), for a row
            ("max_num_seqs"), for a share of its tokens ("budget"), or as they lost their pages ("preempted"); those
            that came since are in none.
        num_preemptions: times a request lost its pages, since start-up.
        num_restarts: times new workers took the place of failed ones.
        num_steps: steps since start-up.
        kv_cache_usage: share of the slabs that hold a page in use.
        moved_bytes: bytes of pages that changed place in the pools of all workers, to empty a slab, since start-up.
        cache: the cache manager's own counts: tokens hit and lost, pages evicted and moved, slabs and pages now;
            since the workers were last started.
    """

    num_running: int
    num_waiting: int
    waiting_by_reason: dict[str, int]
    num_preemptions: int
    num_restarts: int
    num_steps: int
    kv_cache_usage: float
    moved_bytes: int
    cache: CacheStats

    @classmethod
    def of(cls, scheduler: Scheduler, num_steps: int, num_restarts: int, moved_bytes: int) -> EngineStats:
        """Read the numbers of a scheduler and its cache manager; the others are as above."""
        queues, manager = scheduler.queues, scheduler.manager
        return cls(
            num_running=len(queues.running),
            num_waiting=len(queues.waiting),
            waiting_by_reason=scheduler.waiting_by_reason(),
            num_preemptions=queues.num_preemptions,
            num_restarts=num_restarts,
            num_steps=num_steps,
            kv_cache_usage=manager.usage,
            moved_bytes=moved_bytes,
            cache=manager.stats(),
        )
