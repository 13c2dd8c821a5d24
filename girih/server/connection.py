"""`Connection`: uvicorn's HTTP connection with limits on the head of a request, which uvicorn itself has not."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 1 << 16
"""Of request line and headers, beside the last piece that came; beyond it parsing costs time by the square."""

HEAD_TIMEOUT_S = 30.0
"""How long a head may take, from the start of the connection or its first byte."""


class Connection(HttpToolsProtocol):
    """One connection; a head that is too large, or late, ends it."""

    _is_in_head = True
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head."""
        super().connection_made(transport)
        self._start_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, and count what belongs to a head that is not complete yet."""
        was_in_head = self._is_in_head
        super().data_received(data)
        if not (was_in_head and self._is_in_head) or self.transport.is_closing():
            self._head_bytes = 0
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        """Begin a head."""
        super().on_message_begin()
        self._start_head()

    def on_headers_complete(self) -> None:
        """End the head."""
        self._end_head()
        super().on_headers_complete()

    def _start_head(self) -> None:
        self._end_head()
        self._is_in_head = True
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._refuse, b"408 Request Timeout")

    def _end_head(self) -> None:
        self._is_in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()

    def _refuse(self, status: bytes) -> None:
        self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        self.transport.close()
