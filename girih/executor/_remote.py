"""`RemoteExecutor`: what executors with workers in other processes share: calls as messages, answers as futures.

An executor adds how a message reaches the workers, a watcher that takes in their answers and keeps the time, and
how workers start and end.
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from girih.errors import ExecutorError, GirihError
from girih.executor._base import CALL_TIMEOUT_S, Answer, Executor
from girih.executor._calls import Call, Calls
from girih.executor._frames import Buffer, Message, SentError, pack
from girih.executor._served import SHUTDOWN, STEP
from girih.messages import StepInput, StepOutput

logger = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 2.0
"""How long workers get to finish what they do and to release what they hold."""

WATCH_INTERVAL_S = 1.0
"""How often a watcher looks at the clock at least."""


class RemoteExecutor(Executor):
    """Runs workers in other processes; see the module.

    Args:
        make_worker: creates the worker, called in its process with its rank and with where the workers meet: an
            init_method of torch.distributed, None for a lone worker. It is pickled, so a class or a value of one.
        num_workers: ranks.
        output_rank: whose output of a step is the step's.
        step_timeout_s: how long a step may take, from when the one before it has ended.
    """

    def __init__(
        self,
        make_worker: Callable[[int, str | None], Any],
        *,
        num_workers: int,
        output_rank: int,
        step_timeout_s: float = CALL_TIMEOUT_S,
    ):
        self.step_timeout_s = step_timeout_s
        self._make_worker = make_worker
        self._ranks = range(num_workers)
        self._output_rank = output_rank
        self._calls = Calls(on_failure=self._stop_sending, num_workers=num_workers)
        self._sending = threading.Lock()  # a message goes to all workers before the next one to any
        self._watcher: threading.Thread | None = None
        self._sleeps_until = 0.0  # the watcher, which calls that end earlier wake

    def collective_rpc(
        self,
        method: str,
        args: tuple[Any, ...] = (),
        timeout_s: float | None = None,
        *,
        args_by_rank: Sequence[tuple[Any, ...]] | None = None,
    ) -> list[Any]:
        """Call all workers; see `Executor.collective_rpc`."""
        if args_by_rank is not None and len(args_by_rank) != len(self._ranks):
            raise ValueError(f"{method}: arguments for {len(args_by_rank)} workers, there are {len(self._ranks)}")
        limit_s = CALL_TIMEOUT_S if timeout_s is None else timeout_s
        answers: list[Any] = self._submit(method, args, args_by_rank, limit_s).result()  # the watcher keeps the time
        return answers

    def execute_model(self, step: StepInput) -> Future[StepOutput]:
        """Hand one step to all workers; see `Executor.execute_model`."""
        return self._submit(STEP, (step,), None, self.step_timeout_s, is_step=True)

    def check_health(self) -> None:
        """Tell whether all workers were started, live, answer, and were not shut down; see `Executor.check_health`."""
        self._calls.check()

    # ---- sending

    @abstractmethod
    def _send(self, method: str, tag: int, parts: Sequence[Buffer], limit_s: float) -> None:
        """Send a message to every worker; what goes wrong fails the calls."""

    @abstractmethod
    def _stop_sending(self) -> None:
        """Let a `_send` under way return, as the calls have failed; must not wait."""

    @abstractmethod
    def _wake_watcher(self) -> None:
        """Let the watcher look at the clock."""

    def _submit(
        self,
        method: str,
        args: tuple[Any, ...],
        args_by_rank: Sequence[tuple[Any, ...]] | None,
        limit_s: float,
        *,
        is_step: bool = False,
    ) -> Answer:
        if not self._sending.acquire(timeout=limit_s):
            raise ExecutorError(f"{method} could not be sent within {limit_s:g} s, as another call is being sent")
        try:
            ranks: Sequence[int] = (self._output_rank,) if is_step else self._ranks
            tag, call = self._calls.add(method, ranks, limit_s, is_step=is_step)
            try:
                parts = pack(tag, (method, args, args_by_rank, ranks))
            except Exception as error:  # pickle raises anything
                self._calls.error(tag, ExecutorError(f"the arguments of {method} cannot be sent: {error}"))
                return call.future
            try:
                self._send(method, tag, parts, limit_s)
            except BaseException:
                self._calls.fail(f"the sending of {method} was interrupted")
                raise
            if call.deadline < self._sleeps_until:
                self._wake_watcher()
            return call.future
        finally:
            self._sending.release()

    # ---- what a watcher does

    def _fail_overdue(self, call: Call) -> None:
        """Fail everything, as the time of a call is up."""
        text = f"{call.method} did not return within {call.limit_s:g} s"
        self._calls.fail(f"{name_ranks(call.silent)}: {text}{self._describe_stopped()}")

    def _describe_stopped(self) -> str:
        """Say which workers were stopped by a signal, as the end of a sentence; nothing if none is known."""
        return ""

    # ---- the end

    def _release(self) -> GirihError | None:
        """Let the workers release what they hold; returns what one raised. Who does not answer is killed later."""
        if self._calls.failure is not None:
            return None
        try:
            self._submit(SHUTDOWN, (), None, SHUTDOWN_TIMEOUT_S).result()
        except GirihError as error:
            if self._calls.failure is None:
                return error
            logger.warning("workers are killed without releasing what they hold: %s", error)
        return None


def read_answer(rank: int, message: Message) -> tuple[Any, GirihError | None]:
    """Return the value of a worker's answer, or the error that it is."""
    try:
        value = message.value()
        return value, value.error() if isinstance(value, SentError) else None
    except Exception as cause:  # pickle raises anything
        text = f"{type(cause).__name__}: {cause}"
        return None, ExecutorError(f"worker of rank {rank}: its answer cannot be read: {text}")


def name_ranks(ranks: Sequence[int]) -> str:
    """Name workers in a message."""
    if len(ranks) == 1:
        return f"worker of rank {ranks[0]}"
    return f"workers of ranks {', '.join(map(str, ranks))}"
