"""Where every request is: waiting, or running in a row. Only this file moves one from here to there."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable

import numpy as np

from girih.kv.manager import KVCacheManager
from girih.sched.request_state import RequestState


class RequestQueues:
    """The waiting and the running requests, both in the order of the policy.

        add ──> waiting ──enter──> running ──leave──> gone
                   ^                  │
                   └─────preempt──────┘

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
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        """Known tokens of each row."""
        self.num_preemptions = 0
        self.solo: RequestState | None = None
        """The request that runs alone until it has finished; see `scheduler.py`."""
        self._manager = manager
        self._by_row: list[RequestState | None] = [None] * max_num_seqs
        self._num_arrivals = 0

    def add(self, request: RequestState) -> None:
        """Queue a new request."""
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        insort(self.waiting, request, key=self.order)
        self.by_id[request.request_id] = request

    def enter(self, request: RequestState, row: int, num_cached_tokens: int) -> None:
        """Let a waiting request run in `row`."""
        self.waiting.remove(request)
        request.row = row
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached_tokens
        self._by_row[row] = request
        self.num_tokens[row] = request.num_tokens
        insort(self.running, request, key=self.order)

    def preempt(self, request: RequestState) -> None:
        """Take a running request's pages; it waits again with its tokens, before all that came after it."""
        self._give_up_row(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, request, key=self.order)

    def leave(self, request: RequestState) -> None:
        """Drop a request for good, with its pages."""
        if request.row is None:
            self.waiting.remove(request)
        else:
            self._give_up_row(request)
        del self.by_id[request.request_id]
        if request is self.solo:
            self.solo = None

    def in_row(self, row: int) -> RequestState:
        """Return the request that runs in `row`."""
        request = self._by_row[row]
        assert request is not None, row
        return request

    def num_remaining(self) -> list[int]:
        """Return, for each running request, how many known tokens are not computed."""
        rows = rows_of(self.running)
        return (self.num_tokens[rows] - self._manager.num_computed_tokens[rows]).tolist()

    def _give_up_row(self, request: RequestState) -> None:
        assert request.row is not None, request.request_id
        self._manager.free(request.row)
        self._by_row[request.row] = None
        request.row = None
        self.running.remove(request)


def rows_of(requests: Iterable[RequestState]) -> np.ndarray:
    """Return the rows of running requests, int32 [n]."""
    return np.array([request.row for request in requests], dtype=np.int32)
