"""`Job`: the requests to the engine that one HTTP request makes, one per prompt, awaited and aborted together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request

from girih.engine.async_llm import AsyncLLM
from girih.engine.input_processing import TokenizedPrompt
from girih.engine.live_request import LiveRequest
from girih.errors import GirihError
from girih.request import RequestOutput, SamplingParams
from girih.server.errors import ApiError


class ClientGoneError(Exception):
    """The client has closed the connection: there is nobody to answer."""


class Job:
    """The prompts of one HTTP request on their way.

    Args:
        engine: takes them.
        request: its connection is watched: when the client goes, everything is aborted.
        request_id: of the answer.
        on_end: called once, when it has ended.
    """

    def __init__(self, engine: AsyncLLM, request: Request, request_id: str, on_end: Callable[[Job], None]):
        self.request_id = request_id
        self.lives: list[LiveRequest] = []
        self._engine = engine
        self._request = request
        self._news = asyncio.Event()
        self._is_gone = self._has_ended = False
        self._on_end = on_end

    def submit(self, prompts: Sequence[TokenizedPrompt], params: SamplingParams, **options: Any) -> None:
        """Queue all prompts, or none.

        Args:
            prompts: their tokens.
            params: for all of them.
            **options: of `AsyncLLM.submit`.

        Raises:
            GirihError: one cannot be served.
        """
        try:
            for prompt in prompts:
                live = self._engine.submit(prompt, params, request_id=self.request_id, news=self._news, **options)
                self.lives.append(live)
        except GirihError:
            self.end()
            raise
        self._watcher = asyncio.create_task(self._watch())

    @property
    def outputs(self) -> list[RequestOutput]:
        """Return what has come of each prompt so far."""
        return [live.output for live in self.lives]

    async def changed(self) -> list[RequestOutput]:
        """Wait for news of any prompt; returns the outputs of all.

        Raises:
            ClientGoneError: the client has gone.
        """
        await self._news.wait()
        self._news.clear()
        if self._is_gone:
            raise ClientGoneError
        return self.outputs

    async def finished(self) -> list[RequestOutput]:
        """Wait until all completions of all prompts have ended.

        Raises:
            ApiError: a prompt could not be served.
            ClientGoneError: the client has gone.
        """
        while True:
            outputs = await self.changed()
            self.check()
            if all(output.finished for output in outputs):
                return outputs

    def check(self) -> None:
        """Look for a prompt that could not be served.

        Raises:
            ApiError: one; with why, and whose fault it is.
        """
        for live in self.lives:
            if live.output.error is not None:
                if live.is_refused:
                    raise ApiError(400, live.output.error)
                raise ApiError(503, live.output.error, code="engine_error", headers={"Retry-After": "5"})

    def show(self) -> None:
        """Note that the client has seen a part of the answer."""
        for live in self.lives:
            live.is_shown = True

    def end(self) -> None:
        """End what still runs and stop watching. A second call does nothing."""
        if self._has_ended:
            return
        self._has_ended = True
        for live in self.lives:
            self._engine.abort(live)
        if hasattr(self, "_watcher"):
            self._watcher.cancel()
            self._on_end(self)

    async def _watch(self) -> None:
        """Wait for the end of the connection: the body was read, so nothing else comes."""
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        for live in self.lives:
            self._engine.abort(live)  # at once, whatever the answer waits for
        self._news.set()
