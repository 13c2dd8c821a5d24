"""Where every request is: waiting, or running in a row. Only this file moves one from here to there."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable

import numpy as np

from girih.kv.manager import KVCacheManager
from girih.sched.request_state import RequestState
from girih.sched.rows import RunningRows


class RequestQueues:
    """The waiting and the running requests, both in the order of the policy.

        add ──> waiting ──enter──> running ──leave──> gone
                   ^                  │
                   └─────preempt──────┘   or stop_all

    Args:
        manager: frees the pages of whoever gives up its row.
        order: a policy's key; smaller is served earlier and preempted later.
        max_num_seqs: rows.
    """

    def __init__(self, manager: KVCacheManager, order: Callable[[RequestState], tuple[int, ...]], max_num_seqs: int):
        self.order = order
        self.waiting: list[RequestState] = []
        self.running: list[RequestState] = []
        self.by_id: dict[str, RequestState] = {}
        self.rows = RunningRows(max_num_seqs)
        self.num_preemptions = 0
        self._manager = manager
        self._running_rows: np.ndarray | None = None  # None: somebody has entered or left
        self.num_arrivals = 0
        """Requests added so far; the next one's `arrival`."""

    def add(self, request: RequestState) -> None:
        """Queue a new request."""
        request.arrival = self.num_arrivals
        self.num_arrivals += 1
        insort(self.waiting, request, key=self.order)
        self.by_id[request.request_id] = request

    def enter(self, request: RequestState, row: int, num_cached_tokens: int) -> None:
        """Let a waiting request run in `row`."""
        self.waiting.remove(request)
        request.row = row
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached_tokens
        self.rows.enter(request, row)
        insort(self.running, request, key=self.order)
        self._running_rows = None

    def preempt(self, request: RequestState) -> None:
        """Take a running request's pages; it waits again with its tokens, before all that came after it."""
        self._wait_again(request)
        request.num_preemptions += 1
        self.num_preemptions += 1

    def stop_all(self) -> list[RequestState]:
        """Let all running requests wait again, as their pages are lost; returns them."""
        stopped = list(self.running)
        for request in stopped:
            self._wait_again(request)
        return stopped

    def use(self, manager: KVCacheManager) -> None:
        """Take pages from another manager, while no request runs."""
        assert not self.running
        self._manager = manager

    def leave(self, request: RequestState) -> None:
        """Drop a request for good, with its pages."""
        if request.row is None:
            self.waiting.remove(request)
        else:
            self._give_up_row(request)
        del self.by_id[request.request_id]

    def running_rows(self) -> np.ndarray:
        """Return the rows of the running requests in their order, int64 [n]; not to be written to."""
        if self._running_rows is None:
            self._running_rows = rows_of(self.running)
        return self._running_rows

    def num_remaining(self) -> np.ndarray:
        """Return, for each running request in order, how many known tokens are not computed, int32 [n]."""
        rows = self.running_rows()
        return self.rows.num_tokens[rows] - self._manager.num_computed_tokens[rows]

    def _wait_again(self, request: RequestState) -> None:
        self._give_up_row(request)
        insort(self.waiting, request, key=self.order)

    def _give_up_row(self, request: RequestState) -> None:
        assert request.row is not None, request.request_id
        self._manager.free(request.row)
        self.rows.leave(request.row)
        request.row = None
        self.running.remove(request)
        self._running_rows = None


def rows_of(requests: Iterable[RequestState]) -> np.ndarray:
    """Return the rows of running requests, int64 [n]: numpy's own kind of index."""
    return np.array([request.row for request in requests], dtype=np.int64)
