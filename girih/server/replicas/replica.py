"""One replica: an engine in a process of its own and the whole server in front of it, but for the socket."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import ray
from ray import serve

from girih.engine.async_llm import AsyncLLM
from girih.kv.config import one_per_class
from girih.kv.state import unit_tokens
from girih.server.app import make_app
from girih.server.kv_events import KVEventPublisher
from girih.server.metrics import Metrics
from girih.server.replicas.cached_units import retained
from girih.server.replicas.follower import Source
from girih.server.replicas.messages import AsgiMessage, Forwarded
from girih.server.replicas.options import Options
from girih.server.replicas.router import SOURCE
from girih.server.serving import Serving
from girih.server.tracing import Tracer

logger = logging.getLogger("ray.serve")

EXIT_ENGINE_DIED = 1


class Replica:
    """Answers requests that the ingress forwards. It ends with its engine, and Serve starts another one.

    Args:
        options: of the application.

    Raises:
        GirihError: the engine cannot be brought up.
    """

    async def __init__(self, options: Options):  # type: ignore[misc]  # Serve awaits it
        self._server = options.server
        self._engine = AsyncLLM(options.engine, restart=options.server.restart_engine)
        await self._engine.start()
        self.name: str = serve.get_replica_context().replica_id.unique_id
        """Its name in metrics."""
        names = options.server.served_model_name or (options.model_name,)
        self._metrics = Metrics(self._engine, names[0], self.name)
        otlp_endpoint = options.server.otlp_endpoint
        self._tracer = None if otlp_endpoint is None else Tracer(otlp_endpoint, names[0])
        self._app = make_app(Serving(self._engine, options.server, names, self._metrics, self._tracer))
        self._publisher = self._publish() if options.engine.kv_events else None
        self._tasks = {asyncio.create_task(self._metrics.keep_up()), asyncio.create_task(self._end_with_engine())}
        self._is_ending = False

    def _publish(self) -> KVEventPublisher:
        address = ray.util.get_node_ip_address()
        # it listens on every address, as the ingress may be on another machine: what it tells are hashes, and no text
        publisher = KVEventPublisher(endpoint="tcp://*:0", replay_endpoint="tcp://*:0", tells_tokens=False)
        self._endpoint, self._replay_endpoint = (
            f"tcp://{address}:{str(endpoint).rpartition(':')[2]}"
            for endpoint in (publisher.endpoint, publisher.replay_endpoint)
        )
        self._engine.on_kv_events = publisher.publish
        return publisher

    # ---- what the ingress asks

    async def answer(self, request: Forwarded) -> AsyncIterator[list[AsgiMessage]]:
        """Answer a request; yields the messages of the answer as they come, several at once where there are.

        When nobody takes them any more, the application is told that the client has gone.
        """
        exchange = Exchange(request.body)
        task = asyncio.ensure_future(self._app(request.scope, exchange.receive, exchange.send))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(exchange.end)
        try:
            while messages := await exchange.sent():
                if self._is_dead:
                    _leave()  # before it answers with errors what another replica may do
                yield messages
        finally:
            exchange.is_gone.set()

    async def metrics(self) -> str:
        """Return its metrics."""
        text, _ = await self._metrics.text()
        return text

    async def health(self) -> str | None:
        """Return why it cannot serve requests; None if it can."""
        if not self._engine.is_up:
            return "there is no engine now"
        if self._engine.stalled_s > self._server.health_timeout_s:
            return f"work has waited for {self._engine.stalled_s:.0f} s without a step that ended"
        return None

    # ---- what Serve asks

    async def check_health(self) -> None:
        """Raise if Serve should start another replica in place of this one; not while another engine is started."""
        if self._engine.is_up and (problem := await self.health()) is not None:
            raise RuntimeError(problem)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return what the router needs to know."""
        if self._publisher is None:
            return {}
        ready = self._engine.ready
        groups = [group for config in one_per_class(ready.kv_cache_configs) for group in config.groups]
        unit = unit_tokens(groups)
        kept = [(retention.to_json(), num_units) for retention, num_units in retained(groups, unit)]
        source = Source(self._endpoint, self._replay_endpoint, unit, kept, ready.prefix_secret.hex())
        return {SOURCE: dataclasses.asdict(source)}

    async def __del__(self) -> None:
        """End in order; Serve awaits it when requests in progress have ended."""
        self._is_ending = True
        await self._engine.shutdown()
        if self._publisher is not None:
            self._publisher.close()
        if self._tracer is not None:
            self._tracer.close()

    # ---- its end

    @property
    def _is_dead(self) -> bool:
        return not (self._engine.is_up or self._server.restart_engine or self._is_ending)

    async def _end_with_engine(self) -> None:
        reason = await self._engine.wait_until_dead()
        if not self._is_ending:
            logger.error("the engine has died, and so the replica ends: %s", reason)
            _leave()


def _leave() -> NoReturn:
    os._exit(EXIT_ENGINE_DIED)  # Serve sees that at once, and so do those who wait for an answer


class Exchange:
    """One HTTP request as an application sees it.

    Args:
        body: of the request.
    """

    def __init__(self, body: bytes):
        self.is_gone = asyncio.Event()
        """Set when the client has gone."""
        self._body: bytes | None = body
        self._sent: asyncio.Queue[AsgiMessage | None] = asyncio.Queue()

    async def receive(self) -> AsgiMessage:
        """Give the application the body, and then the end of the connection."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: AsgiMessage) -> None:
        """Take a message of the answer."""
        self._sent.put_nowait(message)

    def end(self, task: asyncio.Task[None]) -> None:
        """Take note that the application has ended."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a request failed", exc_info=error)
        self._sent.put_nowait(None)

    async def sent(self) -> list[AsgiMessage]:
        """Wait for messages of the answer; returns all that there are, none at the end."""
        messages = [await self._sent.get()]
        while not self._sent.empty():
            messages.append(self._sent.get_nowait())
        if None in messages and messages[0] is not None:
            self._sent.put_nowait(None)
        return [message for message in messages if message is not None]
