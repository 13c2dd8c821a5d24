"""`LiveRequest`: one request on its way through an `AsyncLLM`, and a wait for what it brings next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from girih.engine.input_processing import TokenizedPrompt
from girih.engine.output_processing import new_request_output
from girih.engine.timings import FinishedRequest, Timings
from girih.request import RequestOutput, SamplingParams


class LiveRequest:
    """One request, its completions, and what has come of them.

    Args:
        request_id: of its output.
        prompt: its tokens.
        params: as the user gave them.
        children: of each completion, with a seed.
        priority: smaller is more important.
        cache_salt: see `AsyncLLM.submit`.
        news: is set whenever something has changed; requests that are awaited together share one.
    """

    def __init__(
        self,
        request_id: str,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        children: Sequence[SamplingParams],
        *,
        priority: int,
        cache_salt: str,
        news: asyncio.Event,
    ):
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.children = children
        self.priority = priority
        self.cache_salt = cache_salt
        self.core_ids: list[str] = []
        self.is_shown = False
        """Whether somebody has seen a part of the output, which therefore cannot be computed anew; set by whoever
        shows it."""
        self.is_refused = False
        """Whether `output.error` is the request's own fault."""
        self.arrived_s = time.monotonic()
        self._num_fruitless_runs = 0
        self._news = news

    def begin(self, core_ids: list[str]) -> None:
        """Start with an empty output, for the first time or again.

        Args:
            core_ids: of its sequences, one per completion.
        """
        self.core_ids = core_ids
        self.output: RequestOutput = new_request_output(
            self.request_id, self.prompt.text, self.prompt.token_ids, self.params
        )
        self._admitted_s: float | None = None
        self._first_token_s: float | None = None
        self._last_token_s: list[float | None] = [None] * len(core_ids)

    def note(self, index: int, began_s: float, now_s: float, timings: Timings | None) -> None:
        """Take note of news.

        Args:
            index: of the completion that they are of.
            began_s: when the step that brought them began; of `time.monotonic`.
            now_s: the time now.
            timings: takes note too, if there is a token.
        """
        self._admitted_s = self._admitted_s or max(began_s, self.arrived_s)
        if timings is not None:
            last_s = self._last_token_s[index]
            timings.add_token(now_s - (last_s or self.arrived_s), is_first=last_s is None)
            self._first_token_s = self._first_token_s or now_s
            self._last_token_s[index] = now_s
        self._news.set()

    def times(self, now_s: float) -> FinishedRequest:
        """Return how long it took, when it has ended."""
        admitted_s, first_token_s = self._admitted_s or now_s, self._first_token_s
        outputs = self.output.outputs
        return FinishedRequest(
            reason=outputs[0].finish_reason or "abort",
            total_s=now_s - self.arrived_s,
            queue_s=admitted_s - self.arrived_s,
            prefill_s=None if first_token_s is None else first_token_s - admitted_s,
            decode_s=None if first_token_s is None else now_s - first_token_s,
            num_prompt_tokens=len(self.prompt.token_ids),
            num_output_tokens=sum(len(output.token_ids) for output in outputs),
            num_completions=self.params.n,
            max_tokens=self.params.max_tokens,
        )

    def may_run_again(self, max_fruitless_runs: int, *, engine_has_stepped: bool) -> bool:
        """Tell whether it may be given to another engine, and count the one that died if it brought nothing.

        Args:
            max_fruitless_runs: engines that may die in a row.
            engine_has_stepped: False for one that died in its first step; then nobody knows whom it had let in.
        """
        if self._first_token_s is not None:
            self._num_fruitless_runs = 0
        elif self._admitted_s is not None or not engine_has_stepped:
            self._num_fruitless_runs += 1
        return self._num_fruitless_runs < max_fruitless_runs

    def fail(self, error: str, *, refused: bool = False) -> None:
        """End it with an error, which is its own fault if `refused`."""
        self.output.error = error
        self.is_refused = refused
        for output in self.output.outputs:
            if output.finish_reason in (None, "abort"):
                output.finish_reason = "error"
        self._news.set()

    def wake(self) -> None:
        """Let whoever waits look again."""
        self._news.set()

    async def changed(self) -> RequestOutput:
        """Wait for news since the last call; returns the output, the same or, after a new start, another one."""
        await self._news.wait()
        self._news.clear()
        return self.output

    async def finished(self) -> RequestOutput:
        """Wait until every completion has ended."""
        output = await self.changed()
        while not output.finished:
            output = await self.changed()
        return output
