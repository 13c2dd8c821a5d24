"""The publisher of what becomes of cached prefixes: a ZeroMQ socket as vLLM's, which prefix-aware routers listen to.

    PUB       topic | sequence number, 8 bytes, big-endian | batch       see kv_event_format.py
    ROUTER    from a client    "" | sequence number of the first batch wanted
              to it            "" | topic | sequence number | batch      for each that is still kept, then
                               "" | ""    | -1              | ""

Sequence numbers count up by one, over every engine that a server starts in its life. A subscriber that misses some asks
for them again, or counts what it knows as gone. All of it happens on a thread of its own: `publish` never waits.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import logging
import socket
import threading
import time
from collections import deque
from dataclasses import replace

import msgspec
import zmq

from girih.errors import ConfigError
from girih.kv.events import KVEvents
from girih.server.kv_event_format import EventBatch, write_events

logger = logging.getLogger(__name__)

MAX_WAITING = 10_000
"""Batches that may wait to be sent; with one more, all of them are forgotten and listeners are told so."""

REPLAY_BYTES = 64 << 20
"""Of batches that were sent, the newest are kept up to so many bytes."""

SEND_HWM = 10_000
"""Batches that may wait for one slow subscriber; it then misses some."""

REPLAY_TIMEOUT_MS = 1000
"""A client of the replay that does not read for so long is given up."""

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class KVEventPublisher:
    """Sends events to whoever listens.

    Args:
        endpoint: where to publish: tcp://*:5557 lets other machines in, tcp://127.0.0.1:5557 does not; a port of 0
            takes a free one; a name or another machine's address, as in tcp://router:5557, connects to a router that
            listens there.
        replay_endpoint: where missed batches can be asked for; None: nowhere.
        topic: that subscribers choose.
        data_parallel_rank: of this engine among its replicas.
        tells_tokens: as of `write_events`.

    Raises:
        ConfigError: an endpoint that cannot be used.
    """

    def __init__(
        self,
        *,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        data_parallel_rank: int = 0,
        tells_tokens: bool = True,
    ):
        self._topic, self._rank, self._tells_tokens = topic.encode(), data_parallel_rank, tells_tokens
        self._backlog = Backlog(MAX_WAITING)
        self._sent = SentBatches(REPLAY_BYTES)
        self._numbers = itertools.count()
        self._context = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._out = self._open(zmq.PUB, endpoint)
            if replay_endpoint is not None:
                self._replay = self._open(zmq.ROUTER, replay_endpoint)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = self._out.get_string(zmq.LAST_ENDPOINT)
        """Where it publishes, with the port that it took."""
        self.replay_endpoint = None if self._replay is None else self._replay.get_string(zmq.LAST_ENDPOINT)
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._thread = threading.Thread(target=self._run, daemon=True, name="girih-kv-events")
        self._thread.start()

    def publish(self, events: KVEvents) -> None:
        """Send events, in the order of the calls; does not wait."""
        if events:
            self._backlog.put(events)
            self._notify()

    def close(self) -> None:
        """Send what waits, give it a second to arrive, and end. A second call does nothing."""
        self._backlog.close()
        self._notify()
        self._thread.join()

    def _open(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        opened: zmq.Socket[bytes] = self._context.socket(kind)
        opened.sndhwm = SEND_HWM
        opened.ipv6 = "[" in endpoint
        if kind == zmq.ROUTER:  # else it drops what a client does not read in time without a word
            opened.router_mandatory = True
            opened.sndtimeo = REPLAY_TIMEOUT_MS
        try:
            if is_ours(endpoint):
                opened.bind(endpoint)
            else:
                opened.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"the endpoint {endpoint!r} for KV events cannot be used: {error}; give one such as tcp://*:5557"
            ) from None
        return opened

    def _notify(self) -> None:
        with contextlib.suppress(OSError):  # it is full, as the thread has yet to see an earlier one; or closed
            self._wake.send(b"\0")

    # ---- on the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while not self._backlog.is_finished:
                ready = dict(poller.poll())
                if self._woken.fileno() in ready:
                    self._woken.recv(4096)
                while (events := self._backlog.take()) is not None:
                    self._send(events)
                if self._replay is not None and self._replay in ready:
                    self._answer(self._replay)
        except Exception:
            logger.exception("KV events are no longer published")
        finally:
            self._backlog.close()
            self._context.destroy(linger=1000)
            self._wake.close()
            self._woken.close()

    def _send(self, events: KVEvents) -> None:
        written = write_events(events, tells_tokens=self._tells_tokens)
        if written:
            number = next(self._numbers).to_bytes(8, "big")
            batch = msgspec.msgpack.encode(EventBatch(time.time(), written, self._rank))
            self._out.send_multipart((self._topic, number, batch))
            self._sent.add(number, batch)

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        client, *rest = replay.recv_multipart()
        if len(rest) != 2 or rest[0] or len(rest[1]) != 8:
            logger.warning("a request for missed KV events is not a sequence number of 8 bytes")
            return
        try:
            for number, batch in self._sent.since(rest[1]):
                replay.send_multipart((client, b"", self._topic, number, batch))
            replay.send_multipart((client, b"", b"", END_OF_REPLAY, b""))
        except zmq.ZMQError as error:
            logger.warning("a client that asked for missed KV events does not read them: %s", error)


class Backlog:
    """What waits to be sent; when there is too much of it, a word that everything is gone takes its place.

    Args:
        most: batches.
    """

    def __init__(self, most: int):
        self._most = most
        self._waiting: deque[KVEvents] = deque()
        self._lock = threading.Lock()
        self._is_closed = False

    def put(self, events: KVEvents) -> None:
        """Add a batch; none is taken after the end."""
        with self._lock:
            if self._is_closed:
                return
            if len(self._waiting) >= self._most:
                logger.warning("%d batches of KV events wait to be sent: listeners begin anew", len(self._waiting))
                self._waiting.clear()
                events = replace(events, is_cleared=True)
            self._waiting.append(events)

    def take(self) -> KVEvents | None:
        """Return the oldest batch; None if there is none."""
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def close(self) -> None:
        """Take no more."""
        self._is_closed = True

    @property
    def is_finished(self) -> bool:
        """Tell whether nothing waits and nothing will."""
        return self._is_closed and not self._waiting


class SentBatches:
    """The newest batches that were sent, by number.

    Args:
        most_bytes: of all that are kept.
    """

    def __init__(self, most_bytes: int):
        self._most_bytes, self._num_bytes = most_bytes, 0
        self._batches: deque[tuple[bytes, bytes]] = deque()

    def add(self, number: bytes, batch: bytes) -> None:
        """Keep a batch, and forget the oldest ones if there are too many bytes."""
        self._batches.append((number, batch))
        self._num_bytes += len(batch)
        while self._num_bytes > self._most_bytes:
            self._num_bytes -= len(self._batches.popleft()[1])

    def since(self, number: bytes) -> list[tuple[bytes, bytes]]:
        """Return the batches from a number on."""
        return [kept for kept in self._batches if kept[0] >= number]


def is_ours(endpoint: str) -> bool:
    """Tell whether to listen at an endpoint, as at addresses of this machine; others are connected to."""
    transport, _, address = endpoint.partition("://")
    if transport != "tcp":
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host == "*"
    return ip.is_loopback or ip.is_unspecified
