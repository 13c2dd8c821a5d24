"""Times a stream of operations on an adapter so that other work on the machine matters little.

The stream is cut at fixed places. Over several runs the least time of each segment counts, and their sum is the
workload's time: a moment in which something else ran costs one segment of one run. What the loop itself costs, found
with an adapter that does nothing, is taken off. Standard library only: another engine's Python runs this file too.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from op_streams import ADMIT, FREE, PREFILL, STEP, STEP_BATCH, Op

NUM_SEGMENTS = 256


class Adapter(Protocol):
    """What a stream is run on; each method is one operation of `op_streams`. `step_batch` may be there too."""

    tick: Callable[[], Any]
    admit: Callable[..., int]
    prefill: Callable[..., Any]
    step: Callable[..., Any]
    free: Callable[..., Any]


class Nothing:
    """The adapter that does nothing."""

    def tick(self) -> None:
        """Do nothing."""

    def admit(self, rid: int, tokens: Sequence[int]) -> int:
        """Do nothing; nothing is cached."""
        return 0

    def prefill(self, rid: int, n_max: int) -> None:
        """Do nothing."""

    def step(self, rid: int, tok: int) -> None:
        """Do nothing."""

    def step_batch(self, rids: Sequence[int], toks: Sequence[int]) -> None:
        """Do nothing."""

    def free(self, rid: int) -> None:
        """Do nothing."""


CLOCKS: dict[str, Callable[[], int]] = {"wall": time.perf_counter_ns, "cpu": time.thread_time_ns}
"""Name -> nanoseconds; "cpu" does not count what the thread waits for, which helps on a machine that others use."""


def timed_run(adapter: Adapter, ops: Sequence[Op], clock: str = "wall") -> tuple[list[int], int]:
    """Run all operations once.

    Args:
        adapter: what to run them on.
        ops: the operations.
        clock: a key of `CLOCKS`.

    Returns:
        (nanoseconds of each segment, tokens that were found cached).
    """
    tick, admit, prefill, free = adapter.tick, adapter.admit, adapter.prefill, adapter.free
    step, step_batch = adapter.step, getattr(adapter, "step_batch", None)
    size = max(1, -(-len(ops) // NUM_SEGMENTS))
    segments, hit_tokens, now = [], 0, CLOCKS[clock]
    gc.collect()
    gc.freeze()  # as an engine does after start-up
    for start in range(0, len(ops), size):
        begin = now()
        for op in ops[start : start + size]:
            kind = op[0]
            if kind == STEP:
                step(op[1], op[2])
            elif kind == STEP_BATCH:
                step_batch(op[1], op[2])
            elif kind == ADMIT:
                hit_tokens += admit(op[1], op[2])
            elif kind == PREFILL:
                prefill(op[1], op[2])
            elif kind == FREE:
                free(op[1])
            else:
                tick()
        segments.append(now() - begin)
    gc.unfreeze()
    return segments, hit_tokens


def quiet_seconds(runs: Sequence[Sequence[int]]) -> float:
    """Add up the least time of each segment over runs, given in nanoseconds."""
    return sum(min(times) for times in zip(*runs, strict=True)) / 1e9


def loop_seconds(ops: Sequence[Op], clock: str = "wall") -> float:
    """Return what the loop of `timed_run` itself costs."""
    return quiet_seconds([timed_run(Nothing(), ops, clock)[0] for _ in range(3)])
