"""Workers in processes of their own on this machine, one per rank.

    engine core  --- commands: one ring, read by all --->  worker 0, worker 1, ...
                 <-- answers: one ring from each --------
    watcher: a thread that starts the processes, then sleeps until an answer comes, a process ends or time is up

Nothing is left behind, however a process ends: rings are memory without a name, and the kernel kills the workers
when the watcher's thread ends, thus also when this process is killed.
"""

from __future__ import annotations

import functools
import logging
import os
import select
import threading
from collections.abc import Callable, Sequence
from typing import Any

from girih.config import EngineConfig
from girih.errors import ExecutorError
from girih.executor._base import Executor
from girih.executor._frames import Buffer
from girih.executor._processes import WorkerProcess, end_processes
from girih.executor._remote import RemoteExecutor, name_ranks, read_answer
from girih.executor._ring import Ring, RingWriter, make_event, make_memory

logger = logging.getLogger(__name__)

SIGNAL_TIMEOUT_S = 1.0
"""How long a process gets to end after its release, and after a signal."""

BLAME_S = 0.05
"""How long an error of one worker waits for the news that another one has ended, which would explain it."""


def create(config: EngineConfig) -> Executor:
    """Make the executor of an engine; `start` brings the workers up."""
    return MultiProcExecutor.of(config)


class MultiProcExecutor(RemoteExecutor):
    """Runs workers in processes of this machine; see the module, and `RemoteExecutor` for the arguments."""

    # ---- the start

    def _prepare(self) -> None:
        self._command_ring = Ring.make(len(self._ranks))
        self._answer_rings = [Ring.make(1) for _ in self._ranks]
        self._meeting_place = make_memory("girih-rendezvous")  # workers find it in /proc; it has no other name
        self._wake, self._failed = make_event(), make_event()
        self._commands = RingWriter(self._command_ring, stop=self._failed)
        self._processes: list[WorkerProcess] = []
        self._running: dict[int, WorkerProcess] = {}  # by the descriptor that tells of the end
        self._launched = threading.Event()

    def _meet(self) -> str | None:
        return None if len(self._ranks) == 1 else f"file:///proc/self/fd/{self._meeting_place}"

    # ---- sending

    def _send(self, method: str, tag: int, parts: Sequence[Buffer], limit_s: float) -> None:
        """Write a message; if it cannot be written as a whole, the ring is of no use any more."""
        try:
            self._commands.write(parts, limit_s)
        except TimeoutError:
            who = name_ranks(self._commands.lagging())
            self._calls.fail(f"{who}: {method} was not taken within {limit_s:g} s{self._describe_stopped()}")
        except BrokenPipeError:
            pass  # workers failed meanwhile, and with them this call

    def _stop_sending(self) -> None:
        os.eventfd_write(self._failed, 1)

    def _wake_watcher(self) -> None:
        os.eventfd_write(self._wake, 1)

    # ---- the watcher's thread

    def _launch(self) -> None:
        """Start the processes from this thread, with which they die, and prepare to hear of them."""
        self._poller = select.poll()
        self._handlers: dict[int, Callable[[], Any]] = {self._wake: lambda: os.eventfd_read(self._wake)}
        try:
            for rank, answers in enumerate(self._answer_rings):
                commands = self._command_ring.of_reader(rank)
                extra = [self._meeting_place]
                process = WorkerProcess(rank, commands, answers, extra)
                self._processes.append(process)
                self._handlers[process.answers.ready] = functools.partial(self._hear, process)
                self._handlers[process.end] = functools.partial(self._note_end, process)
                self._running[process.end] = process
            for descriptor in self._handlers:
                self._poller.register(descriptor, select.POLLIN)
        except OSError as error:
            self._calls.fail(f"the worker of rank {len(self._processes)} could not be started: {error}")
        finally:
            self._launched.set()

    def _take_news(self, timeout_s: float) -> None:
        for descriptor, _ in self._poller.poll(timeout_s * 1000):
            self._handlers[descriptor]()

    def _hear(self, process: WorkerProcess) -> None:
        for message in process.answers.take():
            value, error = read_answer(process.rank, message)
            if error is None:
                self._calls.answer(message.tag, process.rank, value)
                continue
            if isinstance(error, ExecutorError) and len(self._running) > 1 and self._calls.failure is None:
                self._note_ends(BLAME_S)  # perhaps another one has died, and this one was the first to miss it
            self._calls.error(message.tag, error)

    def _note_ends(self, timeout_s: float) -> None:
        """Note the processes that have ended, or the first one that ends in time."""
        poller = select.poll()
        for descriptor in self._running:
            poller.register(descriptor, select.POLLIN)
        for descriptor, _ in poller.poll(timeout_s * 1000):
            self._note_end(self._running[descriptor])

    def _note_end(self, process: WorkerProcess) -> None:
        if self._running.pop(process.end, None) is None:
            return
        self._poller.unregister(process.end)
        self._hear(process)  # its last words
        if process.exit_code() != 0 or not self._is_closing:
            self._calls.fail(process.describe_exit())

    def _describe_stopped(self) -> str:
        stopped = [process.rank for process in self._processes if process.is_stopped()]
        return f"; stopped by a signal: {name_ranks(stopped)}" if stopped else ""

    # ---- the end

    def _end(self, watcher: threading.Thread) -> None:
        if watcher.is_alive():  # the system may have refused the thread
            self._launched.wait()
        if self._calls.failure is None:
            for process in self._processes:
                process.wait(SIGNAL_TIMEOUT_S)
        self._calls.fail("they were shut down")
        end_processes(self._processes, SIGNAL_TIMEOUT_S)
        self._has_ended = True
        os.eventfd_write(self._wake, 1)
        if watcher.is_alive():
            watcher.join()
        with self._sending:  # who was sending has noticed
            self._commands.close()
            for process in self._processes:
                process.close()
            for ring in (self._command_ring, *self._answer_rings):
                ring.close()
            for descriptor in (self._meeting_place, self._wake, self._failed):
                os.close(descriptor)
