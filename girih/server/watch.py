"""`Watch`: what people see of a running engine, asked for once however many look, and never faster than it answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

from girih.engine.async_llm import AsyncLLM
from girih.engine.pool_view import PageInfo, PoolView
from girih.server.errors import ApiError
from girih.server.metrics import Metrics
from girih.server.snapshot import write_snapshot

FRESH_S = 0.4
"""How long everybody is shown the same snapshot; the page asks twice a second."""

TIMEOUT_S = 5.0
"""How long somebody waits for an engine that is in the middle of a step."""


class Watch:
    """Looks at one engine for everybody. At most one call of it is under way there at any time.

    Args:
        engine: what is looked at.
        metrics: counts tokens.
    """

    def __init__(self, engine: AsyncLLM, metrics: Metrics):
        self._engine = engine
        self._metrics = metrics
        self._turn = asyncio.Lock()
        self._look: asyncio.Task[bytes] | None = None
        self._ended_s = float("-inf")

    async def snapshot(self) -> bytes:
        """Return the pool and the requests as `write_snapshot` writes them, not older than `FRESH_S`.

        Raises:
            EngineDiedError: there is no engine now.
            ApiError: it does not answer in time.
        """
        look = self._look
        if look is None or (look.done() and time.monotonic() - self._ended_s > FRESH_S):
            look = self._look = asyncio.create_task(self._take_snapshot())
        return await _in_time(asyncio.shield(look))  # others wait for it too

    async def page(self, group: int, page: int) -> PageInfo:
        """Return what a page is used for now.

        Args:
            group: the group of layers.
            page: the page's id in it.

        Raises:
            RequestError: there is no such page.
            EngineDiedError: there is no engine now.
            ApiError: it does not answer in time.
        """
        info: PageInfo = await _in_time(self._call("page_info", group, page))
        return info

    async def _take_snapshot(self) -> bytes:
        try:
            view: PoolView = await self._call("pool_map")
            facts = {
                "time_s": time.monotonic(),
                "num_output_tokens": self._metrics.num_output_tokens(),
                "num_restarts": self._engine.num_restarts,
            }
            # in a thread: a large pool takes milliseconds, which streams need not wait for
            return await asyncio.to_thread(write_snapshot, view, facts)
        finally:
            self._ended_s = time.monotonic()

    async def _call(self, method: str, *args: Any) -> Any:
        await self._turn.acquire()  # whoever gives up before this has asked nothing
        call = asyncio.create_task(self._engine.call(method, *args))
        call.add_done_callback(lambda _: self._turn.release())  # when the engine has answered, whoever still waits
        return await asyncio.shield(call)


async def _in_time(answer: Awaitable[Any]) -> Any:
    try:
        return await asyncio.wait_for(answer, TIMEOUT_S)
    except TimeoutError:
        message = f"the engine is in the middle of a step that takes longer than {TIMEOUT_S:g} s"
        raise ApiError(503, message, code="engine_busy", headers={"Retry-After": "1"}) from None
