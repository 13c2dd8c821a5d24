"""What a request may cost before its path sees it: heads and bodies without end, and a port that is taken meanwhile."""

import asyncio
import contextlib
import socket
import threading

import pytest
import uvicorn

from girih.errors import ConfigError
from girih.server import access, connection
from girih.server.access import Gate
from girih.server.config import ServerConfig
from girih.server.connection import Connection
from girih.server.serve import _start_listening, listen

HEAD = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


async def count_bytes(scope, receive, send):
    """Answer with the length of the body, as an application behind the gate."""
    num_bytes, message = 0, {"more_body": True}
    while message.get("more_body"):
        message = await receive()
        num_bytes += len(message.get("body", b""))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"7")]})
    await send({"type": "http.response.body", "body": b"%7d" % num_bytes})


@contextlib.contextmanager
def serving(**options):
    """Serve in a thread; gives the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            Gate(count_bytes, ServerConfig(**options)), http=Connection, ws="none", lifespan="off", log_config=None
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=asyncio.run, args=(server.serve([listener]),))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def exchange(port, *pieces):
    """Send pieces and read until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        for piece in pieces:
            with contextlib.suppress(ConnectionError):
                client.sendall(piece)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while piece := client.recv(1 << 16):
                answer += piece
        return answer


def test_a_head_that_does_not_come_in_time_ends_the_connection(monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    with serving() as port:
        for head in (b"", b"POST /x HT", HEAD):
            assert exchange(port, head).startswith(b"HTTP/1.1 408 ")


def test_a_body_that_does_not_come_in_time_ends_the_connection(monkeypatch):
    monkeypatch.setattr(access, "BODY_TIMEOUT_S", 0.2)
    with serving() as port:
        answer = exchange(port, HEAD + b"Content-Length: 9\r\n\r\n12345")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"nothing of the body has come" in answer


def test_heads_of_a_connection_are_counted_one_by_one():
    with serving() as port:
        long = HEAD + b"X: " + b"x" * 40_000 + b"\r\nContent-Length: 100000\r\n\r\n" + b" " * 100_000
        last = HEAD + b"Connection: close\r\nContent-Length: 1\r\n\r\n "
        answer = exchange(port, long, long, long, last)
        assert answer.count(b"HTTP/1.1 200 OK") == 4
        assert exchange(port, HEAD + b"X: " + b"x" * 500_000).startswith(b"HTTP/1.1 431 ")


def test_all_bodies_together_have_a_limit_and_give_back_what_they_took(monkeypatch):
    monkeypatch.setattr(access, "MAX_BODIES", 2)
    with serving(max_body_bytes=1000) as port, contextlib.ExitStack() as stack:
        part = HEAD + b"Connection: close\r\nContent-Length: 1000\r\n\r\n" + b" " * 900
        held = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)) for _ in range(2)]
        for client in held:
            client.sendall(part)
        answer = b""
        while not answer.startswith(b"HTTP/1.1 429 "):  # until what the others have sent was read
            answer = exchange(port, part + b" " * 100)
        assert b"Retry-After".lower() in answer.lower()
        for client in held:
            client.sendall(b" " * 100)
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        assert exchange(port, part + b" " * 100).startswith(b"HTTP/1.1 200 ")


def test_of_two_that_take_one_port_at_once_the_second_to_listen_is_told():
    with listen(ServerConfig(port=0)) as first:
        config = ServerConfig(port=first.getsockname()[1])
        with listen(config) as second:  # nobody listens yet, so the system lets both have it
            _start_listening(first, config)
            with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {config.port}: .*; choose another"):
                _start_listening(second, config)
