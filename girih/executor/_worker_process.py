"""What runs in a worker's process: calls from the ring, one after another, until told to end.

It dies with its parent, however that ends: the kernel sees to it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
from typing import NoReturn

from girih.executor._base import CALL_TIMEOUT_S
from girih.executor._ring import Ring, RingReader, RingWriter
from girih.executor._served import Served, add_package_paths, speak_as

_PR_SET_PDEATHSIG = 1


def main(
    rank: int,
    parent_pid: int,
    log_level: int,
    package_paths: dict[str, list[str]],
    commands: tuple[int, list[int], list[int]],
    answers: tuple[int, list[int], list[int]],
) -> NoReturn:
    """Serve one worker; returns never.

    Args:
        rank: of the worker.
        parent_pid: who must be alive.
        log_level: of the parent's root logger.
        package_paths: package -> folders where its plug-ins are.
        commands: the fields of a `Ring`, as this process reads it.
        answers: the fields of a `Ring`, as this process writes it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent_pid)
    speak_as(rank, log_level)
    add_package_paths(package_paths)
    _serve(Served(rank), RingReader(Ring(*commands)), RingWriter(Ring(*answers)))  # type: ignore[arg-type]
    logging.shutdown()
    os._exit(0)  # what libraries do at the end of an interpreter may hang


def _serve(served: Served, commands: RingReader, answers: RingWriter) -> None:
    is_over = False
    while not is_over:
        parts, is_over = served.answer(commands.receive())
        if parts:
            answers.write(parts, CALL_TIMEOUT_S)
        del parts  # nothing of a finished call stays alive while waiting for the next


def die_with(parent_pid: int) -> None:
    """Let the kernel kill this process when the thread that started it ends, or end now if its parent is dead already.

    Args:
        parent_pid: of the parent.

    Raises:
        OSError: the kernel cannot.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "the kernel does not tell of the parent's end")
    if os.getppid() != parent_pid:
        os._exit(1)
