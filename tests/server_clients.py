"""Clients of a server for tests: streams that are read, left, or never read, and answers that come in threads."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import httpx
from server_process import ServerProcess

TIMEOUT_S = 60.0


def post(
    server: ServerProcess, path: str = "/v1/completions", *, key: str | None = None, **body: Any
) -> httpx.Response:
    """Post a body and return the answer."""
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    content = json.dumps(body)  # in ASCII, as half a surrogate pair has no UTF-8
    return httpx.post(server.url + path, content=content, headers=headers, timeout=TIMEOUT_S, trust_env=False)


def in_thread(work: Any, *args: Any, **options: Any) -> Future[Any]:
    """Call in a thread of its own."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work(*args, **options))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@contextmanager
def stream(server: ServerProcess, path: str = "/v1/completions", **body: Any) -> Iterator[Iterator[Any]]:
    """Post a body with `stream` and give its events: JSON values, "[DONE]" and then nothing."""
    with (
        httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client,
        client.stream("POST", server.url + path, json={**body, "stream": True}) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        yield _events(answer)


def _events(answer: httpx.Response) -> Iterator[Any]:
    for line in answer.iter_lines():
        if line:
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def text_of(events: Iterator[Any]) -> tuple[str, Any]:
    """Read a stream of one completion to its end; return its text and the last event: "[DONE]", or an error."""
    text, last = "", None
    for last in events:
        if last != "[DONE]" and "choices" in last:
            text += last["choices"][0]["text"]
    return text, last


def connect(server: ServerProcess, data: bytes = b"", *, receive_bytes: int | None = None) -> socket.socket:
    """Open a connection and send bytes as they are.

    Args:
        server: to whom.
        data: sent at once.
        receive_bytes: how much the system takes in for a client that does not read; None leaves it as it is.
    """
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(TIMEOUT_S)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(data)
    return connection


def request_bytes(path: str = "/v1/completions", *, headers: str = "", **body: Any) -> bytes:
    """Return a whole request as it goes over the line."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    return (head + headers + "\r\n").encode("latin-1") + content


def read_all(connection: socket.socket) -> bytes:
    """Read until the other side closes the connection, or has nothing to say for a second."""
    connection.settimeout(1.0)
    data = b""
    try:
        while piece := connection.recv(1 << 16):
            data += piece
    except (TimeoutError, ConnectionError):
        pass
    return data
