"""Which request runs next, and what came of the last step. No torch, no model.

There is no prefill and no decode phase: a sequence has known tokens and computed tokens, and each step shares one
token budget among the differences (`batch.py`). The order of the policy decides who gives way when pages are short:

1. whoever is short takes a smaller chunk;
2. then it takes the pages of the newest request of least importance, which waits again and recomputes;
3. that newest one itself only pauses, with its pages, and nobody is admitted meanwhile.

So the first in order always advances and, being first, finishes: alone it has the pages that the plan counted, for
pages move between slabs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from girih.kv.manager import KVCacheManager
from girih.messages import StepInput, StepOutput
from girih.request import output_room
from girih.sched.batch import BUDGET, CAPACITY, NO_ROW, BatchBuilder
from girih.sched.queues import RequestQueues
from girih.sched.request_state import RequestState
from girih.sched.updates import StepUpdate

PREEMPTED = "preempted"

MAX_FAILURES = 3
"""Steps that may fail while a request runs, without a new token of it between, before it is taken for the reason."""


class Scheduler:
    """Takes requests, gives steps, takes results.

    Several steps may be under way, as workers do them strictly in order: what a step computes, and the pages that it
    no longer needs, count as done when it is handed out. Only the tokens that it samples come with its result.

    Args:
        manager: the pages; it says how long a request may be.
        order: a policy's key; smaller is served earlier and preempted later.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of one step.
        num_micro_batches: steps that are in different pipeline stages at once. With several, each takes its share of
            the sequences, and one that waits for the token of its last step takes part in none.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        order: Callable[[RequestState], tuple[int, ...]],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_micro_batches: int = 1,
    ):
        self.manager = manager
        self.queues = RequestQueues(manager, order, max_num_seqs)
        self.max_request_tokens = manager.max_request_tokens
        """The longest request in tokens, prompt and output."""
        self._max_running = min(max_num_seqs, max_num_batched_tokens)  # each running one gets a token every step
        self._max_num_batched_tokens = max_num_batched_tokens
        self._num_micro_batches = num_micro_batches
        self._updates: list[StepUpdate] = []
        self._num_steps = 0
        self._obstacle: str | None = None  # of the last pass, for those that had arrived by then
        self._num_arrivals = 0
        self._under_way: dict[int, np.ndarray] = {}  # step id -> whose the rows were

    def add(self, request: RequestState) -> None:
        """Queue a request; its `max_output_tokens` is cut to what the longest request leaves.

        Raises:
            RequestError: it could never run; the message gives its length and the longest.
        """
        room = output_room(request.num_prompt_tokens, self.max_request_tokens)
        request.max_output_tokens = min(request.max_output_tokens, room)
        self.queues.add(request)

    def abort(self, request_id: str) -> bool:
        """Drop a request and its pages at once, with what was still to be reported of it.

        Returns:
            Whether it was still there.
        """
        for update in self._updates:
            update.drop(request_id)  # also of one that has just ended: nobody waits for its end any more
        request = self.queues.by_id.get(request_id)
        if request is None:
            return False
        self.queues.leave(request)
        return True

    def has_unfinished(self) -> bool:
        """Tell whether any request waits or runs."""
        return bool(self.queues.by_id)

    def has_updates(self) -> bool:
        """Tell whether `take_updates` has something to return."""
        return any(self._updates)

    def take_updates(self) -> list[StepUpdate]:
        """Return what became known since the last call, step by step; steps without news are left out."""
        updates, self._updates = self._updates, []
        return [update for update in updates if update]

    def schedule(self) -> StepInput | None:
        """Choose the work of the next step and reserve its pages.

        Returns:
            The step, or None when there is nothing to do, or nothing before a step under way is back.
        """
        while self.has_unfinished():
            batch = BatchBuilder(
                self.queues,
                self.manager,
                max_num_tokens=self._max_num_batched_tokens,
                max_running=self._max_running,
                num_micro_batches=self._num_micro_batches,
            )
            has_work = batch.fill()
            self._obstacle, self._num_arrivals = batch.obstacle, self.queues.num_arrivals
            if has_work:
                return self._hand_out(batch)
            if self._under_way:
                return None
            self._fail_stuck()
        return None

    def update(self, step: StepInput, output: StepOutput) -> None:
        """Take in the result of a step, in the order of the steps: tokens sampled, requests that ended.

        What it says of requests that are gone, or wait again, is dropped.
        """
        rows, tenancies = self.queues.rows, self._under_way.pop(step.step_id)
        sampled_rows, token_ids = output.rows, output.token_ids
        is_same = rows.tenancies == tenancies
        if not is_same[sampled_rows].all():
            token_ids = token_ids[is_same[sampled_rows]]
            sampled_rows = sampled_rows[is_same[sampled_rows]]
        self.manager.commit(sampled_rows, token_ids)
        update = StepUpdate(rows.request_ids[sampled_rows].tolist(), token_ids.tolist())
        self._updates.append(update)
        may_end = rows.append(sampled_rows, token_ids)
        self._collect_details(update, step, output, is_same)
        for index in may_end.tolist():
            row = int(sampled_rows[index])
            request = rows.request(row)
            ending = request.finish_reason(update.token_ids[index], int(rows.num_output[row]))
            if ending is not None:
                details = update.of(request.request_id)
                details.finish_reason, details.stop_reason = ending
                self.queues.leave(request)
        self._fail([(rows.request(row), error) for row, error in output.failed.items() if is_same[row]], update)

    def make_empty_step(self) -> StepInput:
        """Return a step that computes nothing and tells the workers what has happened to the cache since the last."""
        return self._hand_out(BatchBuilder(self.queues, self.manager, max_num_tokens=0, max_running=0))

    def _hand_out(self, batch: BatchBuilder) -> StepInput:
        self._num_steps += 1
        step = batch.make_step(self._num_steps)
        self._under_way[step.step_id] = self.queues.rows.tenancies.copy()
        return step

    def waiting_by_reason(self) -> dict[str, int]:
        """Count the requests that the last pass left waiting, by what it lacked; those that came since are not in it.

        Returns:
            "preempted" (it ran, and its pages were taken), and for others "capacity" (pages), "max_num_seqs" (a row)
            or "budget" (tokens of the step, or too many prompts in progress), as for the first of them.
        """
        counts = dict.fromkeys((CAPACITY, NO_ROW, BUDGET, PREEMPTED), 0)
        for request in self.queues.waiting:
            if request.num_preemptions:
                counts[PREEMPTED] += 1
            elif self._obstacle is not None and request.arrival < self._num_arrivals:
                counts[self._obstacle] += 1
        return counts

    def longest_request_tokens(self) -> int:
        """Return the most known tokens that an unfinished request has; 0 without any."""
        rows, unfinished = self.queues.rows, self.queues.by_id.values()
        return max(
            (
                request.num_tokens if request.row is None else int(rows.num_tokens[request.row])
                for request in unfinished
            ),
            default=0,
        )

    def limit_requests(self, max_request_tokens: int) -> None:
        """Change the length of the longest request, for new ones and, by cutting their output, for unfinished ones.

        Args:
            max_request_tokens: more than any unfinished request has.
        """
        self.max_request_tokens = max_request_tokens
        for request in self.queues.by_id.values():
            room = max_request_tokens - request.num_prompt_tokens
            request.max_output_tokens = min(request.max_output_tokens, room)
            if request.row is not None:
                self.queues.rows.limit(request.row)

    def stop_all(self, error: str) -> None:
        """Let all requests wait, to be computed again from their tokens: a step failed, and so did those behind it.

        A request that runs in failing steps again and again, without a new token between, is taken for the reason: it
        ends, so that it does not keep all others from going on for ever.
        """
        self._under_way.clear()
        failed = []
        for request in self.queues.stop_all():
            if request.num_tokens > request.num_tokens_at_failure:
                request.num_failures, request.num_tokens_at_failure = 0, request.num_tokens
            request.num_failures += 1
            if request.num_failures == MAX_FAILURES:
                failed.append((request, f"{error} (the last of {MAX_FAILURES} failures since its last token)"))
        self._fail(failed)

    def start_over(self, manager: KVCacheManager, max_request_tokens: int) -> None:
        """Go on with another cache, after `stop_all`.

        Args:
            manager: new, without a request.
            max_request_tokens: the longest request now; one that is as long already ends with an error.
        """
        self.queues.use(manager)
        self.manager = manager
        error = f"new workers can serve requests of up to {max_request_tokens} tokens; this one is as long"
        self._fail([(r, error) for r in self.queues.by_id.values() if r.num_tokens >= max_request_tokens])
        self.limit_requests(max_request_tokens)

    def fail_running(self, error: str) -> None:
        """End every running request with an error and forget all cached prefixes: a step went wrong half-way.

        The steps under way are of no use any more.
        """
        self._under_way.clear()
        self._fail([(request, error) for request in self.queues.running])
        self.manager.reset_prefix_cache()

    def fail_all(self, error: str) -> None:
        """End every request with an error: there will be no more steps."""
        self._fail([(request, error) for request in self.queues.by_id.values()])

    def _fail_stuck(self) -> None:
        """End the first request, although the plan says that it fits, rather than let all others wait behind it."""
        first = (self.queues.running or self.queues.waiting)[0]
        error = (
            f"an error in Girih: {first.num_tokens} tokens find no room in the KV cache, which should hold "
            f"{self.max_request_tokens} of one request; more memory (--kv-cache-memory, --memory-utilization) "
            "may help"
        )
        self._fail([(first, error)])

    def _fail(self, failed: list[tuple[RequestState, str]], update: StepUpdate | None = None) -> None:
        if update is None:
            update = StepUpdate()
            self._updates.append(update)
        for request, error in failed:
            details = update.of(request.request_id)
            details.finish_reason, details.error = "error", error
            self.queues.leave(request)

    def _collect_details(self, update: StepUpdate, step: StepInput, output: StepOutput, is_same: np.ndarray) -> None:
        """Report hits and log probabilities; a prompt position once, also when a preempted prompt is computed again.

        Args:
            update: gets them.
            step: what was computed.
            output: what came of it.
            is_same: bool [max_num_seqs]; rows that still hold the request that they held then.
        """
        rows = self.queues.rows
        for new_row in step.new_rows:
            if is_same[new_row.row]:
                update.of(new_row.request_id).num_cached_tokens = rows.request(new_row.row).num_cached_tokens
        for row, logprobs in output.logprobs.items():
            if is_same[row]:
                update.of(rows.request_ids[row]).logprobs = logprobs
        if not output.prompt_logprobs:
            return
        num_computed = dict(zip(step.rows.tolist(), step.num_computed_tokens.tolist(), strict=True))
        for row, logprobs in output.prompt_logprobs.items():
            if not is_same[row]:
                continue
            request = rows.request(row)
            new = logprobs.since(request.num_prompt_logprobs - num_computed[row])
            if len(new.ranks):
                update.of(request.request_id).prompt_logprobs = new
                request.num_prompt_logprobs += len(new.ranks)
