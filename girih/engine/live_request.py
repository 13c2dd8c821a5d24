"""`LiveRequest`: one request on its way through an `AsyncLLM`, and a wait for what it brings next."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from girih.engine.input_processing import TokenizedPrompt
from girih.engine.output_processing import new_request_output
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
        self._num_fruitless_runs = 0
        self._is_admitted = self._has_token = False
        self._news = asyncio.Event()

    def begin(self, core_ids: list[str]) -> None:
        """Start with an empty output, for the first time or again.

        Args:
            core_ids: of its sequences, one per completion.
        """
        self.core_ids = core_ids
        self.output: RequestOutput = new_request_output(
            self.request_id, self.prompt.text, self.prompt.token_ids, self.params
        )
        self._is_admitted = self._has_token = False

    def note(self, *, has_token: bool) -> None:
        """Take note of news: a token, or only that it runs or has ended."""
        self._is_admitted = True
        self._has_token |= has_token
        self._news.set()

    def may_run_again(self, max_fruitless_runs: int) -> bool:
        """Tell whether it may be given to another engine, and count the one that died if it brought nothing."""
        if self._has_token:
            self._num_fruitless_runs = 0
        elif self._is_admitted:
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
