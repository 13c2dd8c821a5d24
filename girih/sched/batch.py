"""One scheduling pass: share a step's token budget and the free pages among the requests.

From what must not stop to what can wait:

    decodes (1 token each)  ->  running prompts, a share each  ->  newcomers, a share each  ->  leftovers

A prompt gets a share, not all, when others wait, so that a short prompt has its first token soon while a long one
goes on; whatever is left then goes to the prompts in order, so that no budget is lost.

At most `MAX_PARTIAL_PROMPTS` prompts are in progress. While so many are, the first that waits is only let in if this
step can complete it, that is, with about a fifth of the budget; if it cannot, the next that waits and can be
completed goes before it. Each is passed by at most `MAX_TIMES_PASSED` others while it is the first.

Decodes are rows in an array, however many they are; only prompts are looked at one by one.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from girih.kv import capacity
from girih.kv.manager import KVCacheManager
from girih.messages import NewRow, StepInput
from girih.sched.queues import RequestQueues, rows_of
from girih.sched.request_state import RequestState
from girih.units import cdiv

MAX_PARTIAL_PROMPTS = 4
"""Prompts that share the budget of a step; more of them would finish no earlier and hold pages for longer."""

MAX_TIMES_PASSED = 64
"""Short prompts that may go before the first long one that waits."""

# why a pass let nobody else in: no pages, no row, or no share of the token budget
CAPACITY, NO_ROW, BUDGET = "capacity", "max_num_seqs", "budget"


class BatchBuilder:
    """The requests of the next step and how many tokens each computes; filled once, by `fill`.

    Args:
        queues: the requests; this pass admits and preempts there.
        manager: the pages.
        max_num_tokens: the step's token budget.
        max_running: sequences that run at once.
        num_micro_batches: see `Scheduler`.
    """

    def __init__(
        self,
        queues: RequestQueues,
        manager: KVCacheManager,
        *,
        max_num_tokens: int,
        max_running: int,
        num_micro_batches: int = 1,
    ):
        self._queues = queues
        self._manager = manager
        self._budget_left = max_num_tokens
        self._max_running = max_running
        self._num_micro_batches = num_micro_batches
        self._decode_rows = np.zeros(0, dtype=np.int64)  # in order
        self._prompts: dict[RequestState, int] = {}  # those with more than one token to compute -> how many
        self._chunks: dict[RequestState, int] = {}  # tokens that each of them computes in this step
        self._partial: dict[RequestState, int] = {}  # those that this step does not complete -> their chunk so far
        self._newcomers: list[RequestState] = []
        self._admission_open = True
        self.obstacle: str | None = None
        """Why the requests that wait after `fill` were not let in; None if nobody waits."""

    def fill(self) -> bool:
        """Choose the work; see the module.

        Returns:
            Whether there is any: not if nothing can run.
        """
        self._schedule_decodes()
        if self._prompts:
            self._schedule_prompts()
        self._publish_running()  # nothing is preempted in this pass from here on
        self.obstacle = self._admit_waiting()
        if self._partial:
            self._hand_out_leftovers()
        return bool(len(self._decode_rows) or self._chunks)

    def make_step(self, step_id: int) -> StepInput:
        """Write the batch as the message to the workers, which counts as done: they do steps strictly in order."""
        rows, num_scheduled = self._decode_rows, np.ones(len(self._decode_rows), dtype=np.int32)
        if self._chunks:
            chunks = np.fromiter(self._chunks.values(), dtype=np.int32, count=len(self._chunks))
            rows = np.concatenate([rows, rows_of(self._chunks)])
            num_scheduled = np.concatenate([num_scheduled, chunks])
        num_computed = self._manager.num_computed_tokens[rows].astype(np.int32)
        samples = num_computed + num_scheduled == self._queues.rows.num_tokens[rows]
        step = StepInput(
            step_id=step_id,
            new_rows=tuple(_new_row(request) for request in self._newcomers),
            cache=self._manager.take_cache_update(rows),
            rows=rows.astype(np.int32),
            num_computed_tokens=num_computed,
            num_scheduled_tokens=num_scheduled,
            samples=samples,
        )
        self._manager.advance(rows, num_scheduled)
        self._queues.rows.hand_out(rows[samples])
        return step

    # ---- the pass, in order

    def _schedule_decodes(self) -> None:
        queues, remaining = self._queues, self._queues.num_remaining()
        self._decode_rows = queues.running_rows()
        decodes = remaining == 1
        if not decodes.all():
            prompts = np.flatnonzero(remaining > 1)
            self._prompts = {
                queues.running[i]: n for i, n in zip(prompts.tolist(), remaining[prompts].tolist(), strict=True)
            }
            self._partial = dict.fromkeys(self._prompts, 0)
        several = self._num_micro_batches > 1
        decodes &= queues.rows.may_decode(self._decode_rows, needs_token=several)
        if several or not decodes.all():
            share = cdiv(len(self._decode_rows), self._num_micro_batches)
            self._decode_rows = self._decode_rows[decodes][:share]
        self._budget_left -= len(self._decode_rows)
        while len(self._decode_rows):
            num_decodes = len(self._decode_rows)
            num_served = self._manager.reserve(self._decode_rows, np.ones(num_decodes, dtype=np.int32))
            if num_served == num_decodes:
                break
            newest = queues.running[-1]
            if newest.row == self._decode_rows[num_served]:
                self._admission_open = False  # it pauses
                self._drop_decode(newest)
                break
            self._preempt(newest)

    def _schedule_prompts(self) -> None:
        num_sharers = min(len(self._prompts), MAX_PARTIAL_PROMPTS) + bool(self._queues.waiting)
        share = self._share(num_sharers)
        for request, remaining in list(self._prompts.items()):
            wanted = min(remaining, share, self._budget_left)
            if request.row is None or wanted == 0:  # preempted a moment ago, or no budget left
                continue
            chunk = self._manager.max_new_tokens(request.row, wanted)
            while chunk == 0 and self._queues.running[-1] is not request:
                self._preempt(self._queues.running[-1])
                chunk = self._manager.max_new_tokens(request.row, wanted)
            if chunk == 0:
                self._admission_open = False  # the newest pauses
            else:
                self._reserve(request, chunk)

    def _admit_waiting(self) -> str | None:
        """Admit from the front of the queue; only `_short_prompt` passes somebody over. Return what stopped it."""
        waiting = self._queues.waiting
        while waiting:
            if not self._admission_open:
                return CAPACITY
            if len(self._queues.running) >= self._max_running:
                return NO_ROW
            if not self._budget_left:
                return BUDGET
            first = waiting[0]
            enough = len(self._partial) >= MAX_PARTIAL_PROMPTS
            request = self._short_prompt() if enough else first
            share = self._budget_left if enough else self._share(min(len(waiting), MAX_PARTIAL_PROMPTS))
            if request is None:
                return BUDGET
            if not self._admit(request, share):
                return CAPACITY
            first.num_times_passed += request is not first
        return None

    def _short_prompt(self) -> RequestState | None:
        """Return the first that waits if this step can complete it, else the next one that it can."""
        first = self._queues.waiting[0]
        num_cached_tokens = 0
        if first.num_tokens > self._budget_left and not first.wants_prompt_logprobs:
            num_cached_tokens = self._manager.lookup(first.known_token_ids(), first.cache_salt)
        if first.num_tokens - num_cached_tokens <= self._budget_left:
            return first
        if first.num_times_passed >= MAX_TIMES_PASSED:
            return None
        return next((request for request in self._queues.waiting if request.num_tokens <= self._budget_left), None)

    def _admit(self, request: RequestState, share: int) -> bool:
        token_ids = request.known_token_ids()
        admitted = self._manager.admit(
            token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            salt=request.cache_salt,
            read_cache=not request.wants_prompt_logprobs,
            spoken_for=self._spoken_for(),
        )
        if admitted is None:
            return False
        row, num_cached_tokens = admitted
        remaining = len(token_ids) - num_cached_tokens
        chunk = self._manager.max_new_tokens(row, min(remaining, share, self._budget_left))
        if chunk == 0:
            self._manager.free(row)
            return False
        self._queues.enter(request, row, num_cached_tokens)
        self._newcomers.append(request)
        self._prompts[request] = remaining
        self._reserve(request, chunk)
        self._publish([request])
        return True

    def _hand_out_leftovers(self) -> None:
        """Give what nobody else could use to the prompts, the first in order first."""
        for request, chunk in sorted(self._partial.items(), key=lambda item: self._queues.order(item[0])):
            limit = min(self._prompts[request], chunk + self._budget_left)
            if limit == chunk or request.row is None:
                continue
            larger_chunk = self._manager.max_new_tokens(request.row, limit)
            if larger_chunk > chunk:
                self._reserve(request, larger_chunk)
                self._publish([request])

    # ---- parts of it

    def _share(self, num_sharers: int) -> int:
        """Return the most tokens that one of `num_sharers` prompts may take of what is left."""
        return max(self._budget_left // max(1, num_sharers), 1)

    def _spoken_for(self) -> np.ndarray | None:
        """Return the pages of each group, int64, that prompts in progress were admitted for and do not hold yet."""
        if not self._partial:
            return None
        groups = self._manager.groups
        spoken_for = np.zeros(len(groups), dtype=np.int64)
        for request, chunk in self._partial.items():
            peaks = capacity.peak_pages(groups, request.num_tokens)
            num_computed = int(self._manager.num_computed_tokens[request.row])
            for g, group in enumerate(groups):
                first, last = group.retention.live_range(num_computed, chunk, group.block_size)
                spoken_for[g] += max(0, peaks[g] - (last - first))
        return spoken_for

    def _reserve(self, request: RequestState, chunk: int) -> None:
        """Take the pages of a prompt's chunk, whatever it had before."""
        num_served = self._manager.reserve(rows_of([request]), np.array([chunk], dtype=np.int32))
        assert num_served == 1, "max_new_tokens promised more than reserve can do"
        self._budget_left -= chunk - self._chunks.get(request, 0)
        self._chunks[request] = chunk
        if chunk < self._prompts[request]:
            self._partial[request] = chunk
        else:
            self._partial.pop(request, None)

    def _preempt(self, request: RequestState) -> None:
        """Take a request out of this step and of its row; what it gave up is not for newcomers."""
        self._drop_decode(request)
        self._budget_left += self._chunks.pop(request, 0)
        self._prompts.pop(request, None)
        self._partial.pop(request, None)
        self._queues.preempt(request)
        self._admission_open = False

    def _drop_decode(self, request: RequestState) -> None:
        others = self._decode_rows[self._decode_rows != request.row]
        self._budget_left += len(self._decode_rows) - len(others)
        self._decode_rows = others

    def _publish_running(self) -> None:
        """Publish the prompts in progress; of a decode only what is left of the tokens that it entered with."""
        self._publish(self._prompts)
        rows = self._decode_rows
        num_computed = self._manager.num_computed_tokens[rows]
        last = np.flatnonzero(num_computed < self._queues.rows.num_tokens_at_entry[rows])
        if len(last):
            self._manager.publish(rows[last], num_computed[last] + 1)

    def _publish(self, requests: Iterable[RequestState]) -> None:
        scheduled = [request for request in requests if request in self._chunks]
        if scheduled:
            rows = rows_of(scheduled)
            chunks = np.array([self._chunks[request] for request in scheduled], dtype=np.int32)
            self._manager.publish(rows, self._manager.num_computed_tokens[rows] + chunks)


def _new_row(request: RequestState) -> NewRow:
    """Say all that a worker must know of a request that enters the batch."""
    assert request.row is not None
    return NewRow(
        row=request.row,
        request_id=request.request_id,
        token_ids=request.known_token_ids(),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling_params=request.sampling_params,
    )
