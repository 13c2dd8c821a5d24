"""One worker in this process, on a thread of its own.

The thread is what makes a call bounded in time and lets Ctrl-C through while the worker computes. It is a
daemon: a stuck worker does not keep the process from ending.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from girih.config import EngineConfig
from girih.errors import ExecutorError, GirihError
from girih.executor._base import CALL_TIMEOUT_S, Answer, Executor, check_process, worker_error
from girih.executor._served import MakeWorker
from girih.messages import StepInput, StepOutput

logger = logging.getLogger(__name__)

RANK = 0
SHUTDOWN_TIMEOUT_S = 10.0


def create(config: EngineConfig) -> Executor:
    """Make the executor of an engine; `start` brings the worker up."""
    return UniProcExecutor(lambda: MakeWorker(config)(RANK, None))


class UniProcExecutor(Executor):
    """Runs one worker on one thread; see the module.

    Args:
        make_worker: creates the worker; called on the worker's thread.
    """

    def __init__(self, make_worker: Callable[[], Any]):
        self._make_worker = make_worker
        self._thread: threading.Thread | None = None
        self._worker: Any = None
        self._failure: str | None = "it was not started"

    def start(self) -> None:
        """Create the worker on its thread; see `Executor.start`."""
        self._pid = os.getpid()
        # a new queue, as a thread that was stuck before a shutdown may still read the old one
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(self._calls,), name="girih-worker-0", daemon=True)
        self._thread.start()
        self._failure = None
        self._worker = self._wait(self._submit("start", self._make_worker), CALL_TIMEOUT_S)

    def collective_rpc(
        self,
        method: str,
        args: tuple[Any, ...] = (),
        timeout_s: float | None = None,
        *,
        args_by_rank: Sequence[tuple[Any, ...]] | None = None,
    ) -> list[Any]:
        """Call the worker; see `Executor.collective_rpc`."""
        if args_by_rank is not None:
            (args,) = args_by_rank
        self.check_health()
        future = self._submit(method, getattr(self._worker, method), *args)
        return [self._wait(future, CALL_TIMEOUT_S if timeout_s is None else timeout_s)]

    def execute_model(self, step: StepInput) -> Future[StepOutput]:
        """Hand one step to the worker; see `Executor.execute_model`."""
        self.check_health()
        return self._submit("execute_model", self._worker.execute_model, step)

    def check_health(self) -> None:
        """Tell whether the worker was started, answers, and was not shut down; see `Executor.check_health`."""
        if self._failure is not None:
            raise ExecutorError(f"worker of rank {RANK} cannot be used: {self._failure}")
        check_process(self._pid)

    def shutdown(self) -> None:
        """Let the worker release what it holds and end its thread, now or after the call that it is busy with.

        See `Executor.shutdown`.
        """
        thread, self._thread = self._thread, None
        if thread is None or os.getpid() != self._pid:
            return
        timeout_s = SHUTDOWN_TIMEOUT_S if self._failure is None else 0  # a stuck worker was waited for already
        self._failure = "it was shut down"
        released = None if self._worker is None else self._submit("shutdown", self._worker.shutdown)
        self._worker = None
        self._calls.put(None)
        thread.join(timeout_s)
        if thread.is_alive():
            logger.warning("the worker of rank %d is busy; it releases its memory when its call returns", RANK)
        elif released is not None:
            released.result()

    @staticmethod
    def _serve(calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
        """Run calls one after another, on the worker's thread, until told to end."""
        while (item := calls.get()) is not None:
            future, call = item
            try:
                future.set_result(call())
            except BaseException as error:  # whatever it is belongs to the caller, who waits for this future
                future.set_exception(error)
            del item, future, call  # nothing of a finished call stays alive while waiting for the next

    def _submit(self, method: str, call: Callable[..., Any], *args: Any) -> Future[Any]:
        def run() -> Any:
            try:
                return call(*args)
            except GirihError:
                raise
            except Exception as error:
                raise worker_error(RANK, method, error) from error

        def give_up(timeout_s: float | None) -> None:
            self._failure = f"{method} did not return within {timeout_s:g} s"

        future = Answer(give_up)
        self._calls.put((future, run))
        return future

    def _wait(self, future: Future[Any], timeout_s: float) -> Any:
        try:
            return future.result(timeout_s)
        except TimeoutError:
            raise ExecutorError(f"worker of rank {RANK}: {self._failure}") from None
