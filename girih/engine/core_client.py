"""The engine's process as its front end sees it, from an event loop: start it, write to it, read from it, end it."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from typing import Any

from girih.config import EngineConfig
from girih.engine.core_messages import (
    Answer,
    Call,
    FromCore,
    Ready,
    SetUp,
    StartFailed,
    StepDone,
    Stop,
    ToCore,
)
from girih.errors import EngineDiedError
from girih.executor._frames import HEADER, Message, pack
from girih.executor._served import package_paths

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0

_BOOT = (
    "import json, sys; setup = json.loads(sys.argv[1]); sys.path[:] = setup.pop('sys_path'); "
    "from girih.engine.core_process import main; main(**setup)"
)


class CoreClient:
    """One engine's process. It gets SIGKILL when the thread that starts it ends.

    Args:
        config: the engine's options.
    """

    def __init__(self, config: EngineConfig):
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._died: str | None = None

    async def start(self) -> Ready:
        """Start the process and wait until its engine is up.

        Returns:
            What it is.

        Raises:
            GirihError: what the engine says if it cannot be brought up.
            EngineDiedError: the process ended without a word.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            setup = {
                "sys_path": [str(folder) for folder in sys.path],
                "package_paths": package_paths(),
                "descriptor": theirs.fileno(),
                "parent_pid": os.getpid(),
                "log_level": logging.getLogger().getEffectiveLevel(),
            }
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(setup), "girih-engine"],  # the last one is for `ps`
                stdin=subprocess.DEVNULL,
                stdout=2,  # what the engine prints is no output of the front end
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C in the terminal is for the front end
            )
        try:
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
            self.send(SetUp(self._config))
            match await self.receive():
                case Ready() as ready:
                    return ready
                case StartFailed(error):
                    raise error.error()
                case other:
                    raise AssertionError(f"the engine began with {other}")
        except BaseException:  # also where nobody waits for it any more
            self._process.kill()
            raise

    @property
    def pid(self) -> int:
        """Return the process' number."""
        assert self._process is not None
        return self._process.pid

    def send(self, message: ToCore) -> None:
        """Send a message; does not wait. To a process that has ended it goes nowhere, as `receive` will say."""
        if not self._writer.is_closing():  # once a write has failed, uvloop's transport raises
            self._writer.writelines(pack(0, message))

    async def receive(self) -> FromCore:
        """Return the next message; answers to `call` go to whoever called.

        Raises:
            EngineDiedError: the process has ended, or ends; with how.
        """
        while True:
            try:
                header = await self._reader.readexactly(HEADER.size)
                body = await self._reader.readexactly(Message.body_bytes(header))
            except (asyncio.IncompleteReadError, OSError):
                raise EngineDiedError(await self._describe_end()) from None
            message: FromCore = Message(header, bytearray(body)).value()
            if isinstance(message, StepDone) and message.died is not None:
                self._died = message.died
            if not isinstance(message, Answer):
                return message
            call = self._calls.pop(message.call_id, None)
            if call is not None and not call.done():
                if message.error is None:
                    call.set_result(message.value)
                else:
                    call.set_exception(message.error.error())

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the engine core between two steps, while somebody receives.

        Raises:
            GirihError: what it raises.
            EngineDiedError: the process ended before it answered.
        """
        call_id = next(self._call_ids)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self.send(Call(call_id, method, args))
        try:
            return await future
        finally:
            self._calls.pop(call_id, None)

    async def stop(self) -> None:
        """End the process: in order if it listens, else by force; its own workers end with it."""
        if self._process is None:
            return
        self.send(Stop())
        if not await self._has_ended(STOP_TIMEOUT_S):
            logger.warning("the engine did not end within %g s and is killed", STOP_TIMEOUT_S)
            self._process.kill()
            await self._has_ended(STOP_TIMEOUT_S)
        self.close()

    def close(self) -> None:
        """Close this end of the socket; with it the process ends too, if it still runs."""
        self._writer.close()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineDiedError("the engine has ended"))

    async def _has_ended(self, timeout_s: float) -> bool:
        assert self._process is not None
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._process.poll() is None:
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(0.01)
        return True

    async def _describe_end(self) -> str:
        """Say how the process ended; one that closed its socket and still runs is killed."""
        assert self._process is not None
        if not await self._has_ended(STOP_TIMEOUT_S):
            self._process.kill()
            await self._has_ended(STOP_TIMEOUT_S)
        if self._died is not None:
            return self._died
        code = self._process.returncode
        if code is None or code >= 0:
            return f"the engine's process ended with exit code {code}"
        hint = ", by somebody, or by the system as memory ran out" if code == -signal.SIGKILL else ""
        return f"the engine's process was killed by {signal.Signals(-code).name}{hint}"
