"""An answer as a stream of server-sent events, written as the engine brings them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from girih.server.errors import ApiError, error_body
from girih.server.replies.job import ClientGoneError, Job

_ENCODER = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """Return a value as one event."""
    return b"data: " + _ENCODER.encode(value) + b"\n\n"


class EventStream(Response):
    """A stream that begins with what is there already and goes on while the job does.

    An error after the beginning is an event of its own, as the status is gone by then; no [DONE] follows it.

    Args:
        job: what is answered; it ends with the stream, however that ends.
        first: the first events.
        rest: gives the events that follow, joined, whenever there are any.
    """

    media_type = "text/event-stream"

    def __init__(self, job: Job, first: bytes, rest: AsyncIterator[bytes]):
        self.background = None
        self.status_code = 200
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._job, self._first, self._rest = job, first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the stream."""
        try:
            self._job.show()
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await _write(send, self._first)
            try:
                async for events in self._rest:
                    await _write(send, events)
                await _write(send, DONE)
            except ApiError as error:
                await _write(send, event(error_body(error.status, error.message, error.param, error.code)))
            await send({"type": "http.response.body", "body": b""})
        except ClientGoneError:
            pass  # uvicorn has noticed too
        finally:
            self._job.end()


async def _write(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def stream_of(job: Job, events: AsyncIterator[bytes]) -> EventStream:
    """Wait for the first events of an answer, so that what goes wrong before them still has a status of its own.

    Args:
        job: what is answered.
        events: the answer.

    Raises:
        ApiError: it could not be served.
        ClientGoneError: the client has gone.
    """
    try:
        return EventStream(job, await anext(events), events)
    except BaseException:
        job.end()
        raise
