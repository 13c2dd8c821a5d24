"""The engine's process: brings the core up, takes requests from a socket, steps, and sends what became known.

    socket ── reader thread ──> inbox ──> main thread: core.step() ──> outbox ── writer thread ──> socket

Neither a front end that is busy nor a message of many tokens holds a step up. The process ends with its parent: when
the socket is closed, or, should it hang, by the kernel.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

from girih.config import EngineConfig
from girih.engine.core import EngineCore
from girih.engine.core_messages import (
    AbortRequests,
    AddRequest,
    Answer,
    Call,
    FromCore,
    Ready,
    Refused,
    SetUp,
    StartFailed,
    StepDone,
    Stop,
    ToCore,
)
from girih.errors import GirihError
from girih.executor._frames import HEADER, Message, SentError, pack
from girih.executor._served import add_package_paths
from girih.executor._worker_process import die_with

logger = logging.getLogger(__name__)

EXIT_DIED = 1


def main(descriptor: int, parent_pid: int, log_level: int, package_paths: dict[str, list[str]]) -> NoReturn:
    """Serve one engine; returns never.

    Args:
        descriptor: of the connected socket to the front end.
        parent_pid: who must be alive.
        log_level: of the parent's root logger.
        package_paths: package -> folders where its plug-ins are.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the front end, which ends this process in order
    die_with(parent_pid)
    logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s engine %(name)s: %(message)s")
    add_package_paths(package_paths)
    line = Line(socket.socket(fileno=descriptor))
    set_up = line.inbox.get()
    code = _serve(set_up.config, line) if isinstance(set_up, SetUp) else 0
    line.flush()
    logging.shutdown()
    os._exit(code)  # what libraries do at the end of an interpreter may hang


class Line:
    """The socket, read and written by threads of its own.

    Args:
        connection: to the front end. When that closes it, this process ends.
    """

    def __init__(self, connection: socket.socket):
        self.inbox: SimpleQueue[ToCore] = SimpleQueue()
        self._outbox: SimpleQueue[FromCore | None] = SimpleQueue()
        self._connection = connection
        threading.Thread(target=self._read, daemon=True, name="girih-engine-reader").start()
        self._writer = threading.Thread(target=self._write, daemon=True, name="girih-engine-writer")
        self._writer.start()

    def send(self, message: FromCore) -> None:
        """Send a message; does not wait."""
        self._outbox.put(message)

    def flush(self) -> None:
        """Wait until everything is sent; nothing can be sent afterwards."""
        self._outbox.put(None)
        self._writer.join()

    def _read(self) -> None:
        stream = self._connection.makefile("rb")
        try:
            while header := stream.read(HEADER.size):
                body = bytearray(Message.body_bytes(header))
                stream.readinto(body)
                self.inbox.put(Message(header, body).value())
        except OSError as error:
            logger.error("the front end cannot be heard: %s", error)
        except Exception:
            logger.exception("a message of the front end cannot be read")
        os._exit(EXIT_DIED)  # the front end is gone: nobody waits for anything

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                for part in pack(0, message):
                    self._connection.sendall(part)
            except OSError:
                os._exit(EXIT_DIED)


def _serve(config: EngineConfig, line: Line) -> int:
    """Bring the core up and step until told to stop; return the exit code of the process."""
    try:
        core = EngineCore(config)
    except GirihError as error:
        line.send(StartFailed(SentError(error)))
        return EXIT_DIED
    line.send(Ready(core.max_model_len, core.startup_report, core.kv_cache_configs, core.prefix_secret))
    try:
        return _step_until_stopped(core, line)
    finally:
        core.shutdown()


def _step_until_stopped(core: EngineCore, line: Line) -> int:
    while True:
        try:
            message = line.inbox.get(block=not core.has_unfinished())
            while True:
                if isinstance(message, Stop):
                    return 0
                _take_in(core, message, line)
                message = line.inbox.get_nowait()
        except Empty:
            pass
        if core.has_unfinished():
            updates = core.step()
            line.send(StepDone(updates, core.death, core.take_kv_events() if core.config.kv_events else None))
        if core.death is not None:
            return EXIT_DIED


def _take_in(core: EngineCore, message: ToCore, line: Line) -> None:
    match message:
        case AddRequest():
            try:
                core.add_request(
                    message.token_ids,
                    message.params,
                    priority=message.priority,
                    cache_salt=message.cache_salt,
                    request_id=message.request_id,
                )
            except GirihError as error:
                line.send(Refused(message.request_id, str(error)))
        case AbortRequests():
            for request_id in message.request_ids:
                core.abort(request_id)
        case Call():
            line.send(_answer(core, message))


def _answer(core: EngineCore, call: Call) -> Answer:
    try:
        value: Any = getattr(core, call.method)(*call.args)
    except GirihError as error:
        return Answer(call.call_id, error=SentError(error))
    return Answer(call.call_id, value)
