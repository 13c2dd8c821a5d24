"""Follows the KV events of one replica over ZeroMQ: what was missed is asked for again, or everything is forgotten."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from girih.kv.specs import retention_from_json
from girih.server.kv_event_format import EventBatch
from girih.server.kv_events import END_OF_REPLAY
from girih.server.replicas.cached_units import CachedUnits

logger = logging.getLogger(__name__)

REPLAY_TIMEOUT_MS = 2000
"""How long the next missed batch may take to come."""


@dataclass(frozen=True)
class Source:
    """Where a replica publishes its events, and how to read them.

    Args:
        endpoint: of its publisher.
        replay_endpoint: where missed batches are asked for.
        unit_tokens: tokens of a unit.
        groups: for each group of layers its retention, as JSON, and the units of its blocks.
        secret: of the hashes, in hexadecimal.
    """

    endpoint: str
    replay_endpoint: str
    unit_tokens: int
    groups: list[tuple[dict[str, Any], int]]
    secret: str


class Follower:
    """Keeps `units` up with a replica.

    Args:
        context: makes sockets.
        source: the replica's.
    """

    def __init__(self, context: zmq.asyncio.Context, source: Source):
        groups = [(retention_from_json(kept), num_units) for kept, num_units in source.groups]
        self.units = CachedUnits(source.unit_tokens, groups)
        self._context = context
        self._source = source
        self._next = 0  # number of the batch that comes next
        self._decode = msgspec.msgpack.Decoder(EventBatch).decode

    async def run(self) -> None:
        """Follow until cancelled. If that fails nothing is known any more, and requests are routed by load alone."""
        listener: zmq.asyncio.Socket = self._context.socket(zmq.SUB)
        try:
            listener.subscribe(b"")
            listener.connect(self._source.endpoint)
            await self._catch_up()  # with what was sent before
            while True:
                _, number, batch = await listener.recv_multipart()
                await self.take(int.from_bytes(number, "big"), batch)
        except Exception:
            logger.exception("the KV events of %s cannot be followed", self._source.endpoint)
        finally:
            self.units.clear()
            listener.close(linger=0)

    async def take(self, number: int, batch: bytes) -> None:
        """Take in a batch, after those that were missed; one that was taken before changes nothing."""
        if number > self._next:
            await self._catch_up()
            if number > self._next:
                self._forget(number)
        if number == self._next:
            self._apply(batch)

    async def _catch_up(self) -> None:
        async for number, batch in self._missed():
            if number > self._next:
                self._forget(number)
            if number == self._next:
                self._apply(batch)

    def _forget(self, number: int) -> None:
        logger.info("events before %d of %s are lost: what was known is forgotten", number, self._source.endpoint)
        self.units.clear()
        self._next = number

    def _apply(self, batch: bytes) -> None:
        for event in self._decode(batch).events:
            self.units.apply(event)
        self._next += 1

    async def _missed(self) -> AsyncIterator[tuple[int, bytes]]:
        """Ask for the batches from the next one on; yields those that still exist."""
        replay: Any = self._context.socket(zmq.DEALER)
        try:
            replay.connect(self._source.replay_endpoint)
            await replay.send_multipart((b"", self._next.to_bytes(8, "big")))
            while await replay.poll(REPLAY_TIMEOUT_MS):
                _, _, number, batch = await replay.recv_multipart()
                if number == END_OF_REPLAY:
                    return
                yield int.from_bytes(number, "big"), batch
        finally:
            replay.close(linger=0)
