"""An answer on its way to a client, while the replica that gives it may be lost."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import Send

from girih.server.errors import ApiError, error_body
from girih.server.replicas.messages import AsgiMessage
from girih.server.replies.sse import event

LOST = "the replica that worked on the request was lost"


class Answer:
    """Passes messages on. The first one waits for the second: a request of which nothing was shown can be repeated.

    Args:
        send: to the client.
    """

    def __init__(self, send: Send):
        self._send = send
        self._start: AsgiMessage | None = None
        self.has_begun = False
        """Whether the client has seen some of it."""
        self._is_stream = False

    async def pass_on(self, messages: Sequence[AsgiMessage]) -> None:
        """Send messages."""
        for message in messages:
            if message["type"] == "http.response.start":
                self._start = message
                self._is_stream = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
                continue
            if not self.has_begun and self._start is not None:
                self.has_begun = True
                await self._send(self._start)
            await self._send(message)

    async def fail(self) -> None:
        """End an answer that nobody will finish: a stream with an error as its last event, another one by breaking off.

        Raises:
            ApiError: it has not begun, and an error can take its place.
            ConnectionError: it cannot be told otherwise.
        """
        if not self.has_begun:
            raise ApiError(503, LOST, code="engine_unavailable", headers={"Retry-After": "5"})
        if not self._is_stream:
            raise ConnectionError(LOST)
        body = event(error_body(503, LOST, code="engine_error"))
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
