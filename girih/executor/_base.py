"""`Executor`: how the engine core reaches its workers. An executor is a file in this package with `create`.

Five methods and no more: whatever a worker can do is reached by its method's name through `collective_rpc`,
so that a new feature of a worker changes no executor. Bring-up is written once, in the engine core.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

from girih.errors import ExecutorError, GirihError
from girih.messages import StepInput, StepOutput

CALL_TIMEOUT_S = 3600.0
"""The longest that a call may take unless the caller says otherwise: a stuck worker is an error, not silence."""


class Answer(Future[Any]):
    """The future of a call that tells when somebody has given up waiting for it.

    Args:
        give_up: called with the seconds waited: the time limit or, if that was 0, those since the call was made.
    """

    def __init__(self, give_up: Callable[[float | None], None]):
        super().__init__()
        self._give_up = give_up
        self._start_s = time.monotonic()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result; see `Future.result`."""
        try:
            return super().result(timeout)
        except TimeoutError:  # ours: one that the worker raises comes as an ExecutorError
            self._give_up(timeout or round(time.monotonic() - self._start_s, 1))
            raise


def worker_error(rank: int, method: str, error: BaseException) -> GirihError:
    """Return what the caller of a method that failed is told: an error for the user as it is, others in words."""
    if isinstance(error, GirihError):
        return error
    return ExecutorError(f"worker of rank {rank} failed in {method}: {type(error).__name__}: {error}")


def check_process(pid: int) -> None:
    """Refuse workers to a copy of the process that started them: it has none of the threads that they need.

    Raises:
        ExecutorError: this is not the process of that id.
    """
    if os.getpid() != pid:
        raise ExecutorError(
            f"the workers belong to process {pid}, of which this one is a copy (fork): start an engine in this one, "
            'or start this one by multiprocessing\'s "spawn"'
        )


class Executor(ABC):
    """Owns the workers and carries calls to them.

    `workers_are_local` tells whether all of them are on this machine, so that its memory is the most they can have.
    """

    workers_are_local: ClassVar[bool] = True

    @abstractmethod
    def start(self) -> None:
        """Create the workers.

        Raises:
            ExecutorError: a worker could not be created; with its rank and the original text.
        """

    @abstractmethod
    def collective_rpc(
        self,
        method: str,
        args: tuple[Any, ...] = (),
        timeout_s: float | None = None,
        *,
        args_by_rank: Sequence[tuple[Any, ...]] | None = None,
    ) -> list[Any]:
        """Call a method of every worker and wait for all answers.

        Args:
            method: name of a public method of the worker.
            args: the same positional arguments for every worker.
            timeout_s: seconds to wait; None takes `CALL_TIMEOUT_S`.
            args_by_rank: instead of `args`, one tuple of arguments per worker.

        Returns:
            The answers, by rank.

        Raises:
            GirihError: what a worker raised for the user, unchanged.
            ExecutorError: any other failure or a timeout; with the rank and the original text.
        """

    @abstractmethod
    def execute_model(self, step: StepInput) -> Future[StepOutput]:
        """Hand one step to the workers, which apply steps strictly in order.

        Returns:
            A future of the output of the worker that samples; it fails with the errors of `collective_rpc`. Whoever
            waits for it and gives up marks the workers as failed.
        """

    @abstractmethod
    def check_health(self) -> None:
        """Return if every worker can take another step.

        Raises:
            ExecutorError: one cannot; with its rank and why.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Release the workers and what they hold; a second call does nothing.

        Busy workers are waited for only briefly, and are no error: they are released when their call returns.
        """
