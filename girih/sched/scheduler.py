"""Which request runs next, and what came of the last step. No torch, no model.

There is no prefill and no decode phase: a sequence has known tokens and computed tokens, and each step shares one
token budget among the differences (`batch.py`). The order of the policy decides who gives way when pages are short:

1. whoever is short takes a smaller chunk;
2. then it takes the pages of the newest request of least importance, which waits again and recomputes;
3. that newest one itself only pauses, with its pages, and nobody is admitted meanwhile.

So the first in order always advances and, being first, finishes. One case is left: it is alone, and still has no
page. The plan says that it fits, but its pages, or cached ones, lie scattered over all slabs, and nothing moves pages
between slabs. Then it starts again solo: on an empty pool, without any cached prefix, where pages are taken in order
and the plan's promise holds. Nobody else is admitted until a solo request has finished.
"""

from __future__ import annotations

from collections.abc import Callable

from girih.errors import RequestError
from girih.kv import capacity
from girih.kv.manager import KVCacheManager
from girih.messages import StepInput, StepOutput
from girih.sched.batch import BatchBuilder
from girih.sched.queues import RequestQueues
from girih.sched.request_state import RequestState, RequestUpdate


class Scheduler:
    """Takes requests, gives steps, takes results; `schedule` and `update` alternate.

    Args:
        manager: the pages; its plan says how long a request may be.
        order: a policy's key; smaller is served earlier and preempted later.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of one step.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        order: Callable[[RequestState], tuple[int, ...]],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ):
        self.manager = manager
        self.queues = RequestQueues(manager, order, max_num_seqs)
        self.max_request_tokens = min(manager.config.max_model_len, capacity.max_request_tokens(manager.config))
        self._max_running = min(max_num_seqs, max_num_batched_tokens)  # each running one gets a token every step
        self._max_num_batched_tokens = max_num_batched_tokens
        self._updates: dict[str, RequestUpdate] = {}
        self._num_steps = 0

    def add(self, request: RequestState) -> None:
        """Queue a request; its `max_output_tokens` is cut to what the longest request leaves.

        Raises:
            RequestError: it could never run; the message gives its length and the longest.
        """
        room = self.max_request_tokens - request.num_prompt_tokens
        if room < 1:
            raise RequestError(
                f"a prompt of {request.num_prompt_tokens} tokens and one token of output exceed the longest request "
                f"that can be served, {self.max_request_tokens} tokens; shorten the prompt, or raise --max-model-len "
                "or the memory of the KV cache (--kv-cache-memory, --memory-utilization)"
            )
        request.max_output_tokens = min(request.max_output_tokens, room)
        self.queues.add(request)

    def abort(self, request_id: str) -> bool:
        """Drop a request and its pages at once, with what was still to be reported of it.

        Returns:
            Whether it was still there.
        """
        self._updates.pop(request_id, None)  # also of one that has just ended: nobody waits for its end any more
        request = self.queues.by_id.get(request_id)
        if request is None:
            return False
        self.queues.leave(request)
        return True

    def has_unfinished(self) -> bool:
        """Tell whether any request waits or runs."""
        return bool(self.queues.by_id)

    def take_updates(self) -> list[RequestUpdate]:
        """Return what became known of each request since the last call."""
        updates, self._updates = self._updates, {}
        return list(updates.values())

    def schedule(self) -> StepInput | None:
        """Choose the work of the next step and reserve its pages.

        Returns:
            The step, or None when there is nothing to do.
        """
        while self.has_unfinished():
            batch = BatchBuilder(
                self.queues,
                self.manager,
                max_num_tokens=self._max_num_batched_tokens,
                max_running=self._max_running,
            )
            batch.fill()
            if batch.chunks:
                self._num_steps += 1
                return batch.make_step(self._num_steps)
            self._start_solo()
        return None

    def update(self, step: StepInput, output: StepOutput) -> None:
        """Take in the result of a step: tokens computed, tokens sampled, requests that ended."""
        self.manager.advance(step.rows, step.num_scheduled_tokens)
        self.manager.commit(output.rows, output.token_ids)
        self.queues.num_tokens[output.rows] += 1
        self._collect_prompt_logprobs(step, output)
        for row, token_id in zip(output.rows.tolist(), output.token_ids.tolist(), strict=True):
            request = self.queues.in_row(row)
            request.output_token_ids.append(token_id)
            update = self._update_of(request)
            update.token_ids.append(token_id)
            if row in output.logprobs:
                update.logprobs.append(output.logprobs[row])
            ending = request.finish_reason()
            if ending is not None:
                update.finish_reason, update.stop_reason = ending
                self.queues.leave(request)
        for row, error in output.failed.items():
            self._fail(self.queues.in_row(row), error)

    def fail_running(self, error: str) -> None:
        """End every running request with an error and forget all cached prefixes: a step went wrong half-way."""
        for request in list(self.queues.running):
            self._fail(request, error)
        self.manager.reset_prefix_cache()

    def fail_all(self, error: str) -> None:
        """End every request with an error: there will be no more steps."""
        for request in list(self.queues.by_id.values()):
            self._fail(request, error)

    def _start_solo(self) -> None:
        """Nothing could be scheduled: run the first request alone, or end it if it already was."""
        queues = self.queues
        assert len(queues.running) <= 1, "several requests run and none advances"
        if queues.solo is not None:
            self._fail(
                queues.solo,
                f"{queues.solo.num_tokens} tokens do not fit in the KV cache, even alone; give it more memory "
                "(--kv-cache-memory, --memory-utilization) or shorten the request",
            )
            return
        first = (queues.running or queues.waiting)[0]
        if first.row is not None:
            queues.preempt(first)
        self.manager.reset_prefix_cache()
        queues.solo = first

    def _fail(self, request: RequestState, error: str) -> None:
        update = self._update_of(request)
        update.finish_reason, update.error = "error", error
        self.queues.leave(request)

    def _update_of(self, request: RequestState) -> RequestUpdate:
        update = self._updates.get(request.request_id)
        if update is None:
            update = RequestUpdate(request.request_id, num_cached_tokens=request.num_cached_tokens or 0)
            self._updates[request.request_id] = update
        return update

    def _collect_prompt_logprobs(self, step: StepInput, output: StepOutput) -> None:
        """Report each prompt position once, also when a preempted prompt is computed again."""
        if not output.prompt_logprobs:
            return
        num_computed = dict(zip(step.rows.tolist(), step.num_computed_tokens.tolist(), strict=True))
        for row, logprobs in output.prompt_logprobs.items():
            request = self.queues.in_row(row)
            new = logprobs.since(request.num_prompt_logprobs - num_computed[row])
            if len(new.ranks):
                self._update_of(request).prompt_logprobs = new
                request.num_prompt_logprobs += len(new.ranks)
