"""What runs in a worker's process: calls from the ring, one after another, until told to end.

It dies with its parent, however that ends: the kernel sees to it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import logging
import os
import signal
import traceback
from typing import Any, NoReturn

from girih.executor._base import CALL_TIMEOUT_S, worker_error
from girih.executor._frames import Buffer, Message, SentError, pack
from girih.executor._ring import Ring, RingReader, RingWriter

START, SHUTDOWN = "start", "shutdown"
_PR_SET_PDEATHSIG = 1


class Served:
    """The worker and the calls to it.

    Args:
        rank: of the worker.
    """

    def __init__(self, rank: int):
        self.rank = rank
        self.worker: Any = None

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        """Make the worker, or call a method of it; `SHUTDOWN` needs no worker."""
        if method == START:
            make_worker, rendezvous = args
            self.worker = make_worker(self.rank, rendezvous)
            return None
        if method == SHUTDOWN and self.worker is None:
            return None
        return getattr(self.worker, method)(*args)


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
    _die_with(parent_pid)
    faulthandler.enable()
    text = f"worker of rank {rank}: %(levelname)s: %(name)s: %(message)s"
    logging.basicConfig(level=log_level, format=text)
    for package, folders in package_paths.items():
        importlib.import_module(package).__path__[:] = folders  # in place: its spec shares the list
    _serve(Served(rank), RingReader(Ring(*commands)), RingWriter(Ring(*answers)))  # type: ignore[arg-type]
    logging.shutdown()
    os._exit(0)  # what libraries do at the end of an interpreter may hang


def _serve(served: Served, commands: RingReader, answers: RingWriter) -> None:
    is_over = False
    while not is_over:
        parts, is_over = _answer(served, commands.receive())
        if parts:
            answers.write(parts, CALL_TIMEOUT_S)
        del parts  # nothing of a finished call stays alive while waiting for the next


def _answer(served: Served, message: Message) -> tuple[list[Buffer], bool]:
    """Do one call; returns what to send back, if anything, and whether it was the last call."""
    method = "a call that could not be read"
    try:
        method, args, args_by_rank, ranks = message.value()
        value = served.call(method, args if args_by_rank is None else args_by_rank[served.rank])
        parts = pack(message.tag, value) if served.rank in ranks else []
    except BaseException as error:  # whatever it is belongs to the caller
        parts = pack(message.tag, _sent(served.rank, method, error))
    return parts, method == SHUTDOWN


def _sent(rank: int, method: str, error: BaseException) -> SentError:
    told = worker_error(rank, method, error)
    told.add_note(f"on the worker of rank {rank}:\n{''.join(traceback.format_exception(error))}")
    return SentError(told)


def _die_with(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent dies, or end now if it is dead already."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "the kernel does not tell of the parent's end")
    if os.getppid() != parent_pid:
        os._exit(1)
