"""`RemoteExecutor`: what executors with workers in other processes share: calls as messages, answers as futures.

    start      prepare -> watcher begins: launch -> meet -> the workers are made        _prepare _launch _meet
    a call     send to all, from any thread                                            _send _stop_sending
    watcher    a thread: takes in answers and ends of workers, and keeps the time      _take_news _wake_watcher
    shutdown   the workers release what they hold -> end                               _end

An executor defines what stands on the right.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Self

from girih.config import EngineConfig
from girih.errors import ExecutorError, GirihError
from girih.executor._base import CALL_TIMEOUT_S, Answer, Executor, check_process
from girih.executor._calls import Call, Calls
from girih.executor._frames import Buffer, Message, SentError, pack
from girih.executor._served import SHUTDOWN, START, STEP, MakeWorker
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
        self._is_closing = self._has_ended = False
        self._pid = os.getpid()

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        """Return the executor of an engine's workers."""
        return cls(
            MakeWorker(config),
            num_workers=config.world_size,
            output_rank=config.world_size - config.tensor_parallel_size,  # the first rank of the last stage
            step_timeout_s=config.step_timeout_s,
        )

    def start(self) -> None:
        """Create the workers, all at the same time; see `Executor.start`."""
        assert self._watcher is None, "start is called once, or again after shutdown"
        self._pid = os.getpid()
        self._prepare()
        self._is_closing = self._has_ended = False
        self._sleeps_until = 0.0
        self._calls.open()
        self._watcher = threading.Thread(target=self._watch, name="girih-watcher", daemon=True)
        try:
            self._watcher.start()
            self.collective_rpc(START, (self._make_worker, self._meet()))
        except BaseException as error:
            self._calls.fail(f"the start failed: {str(error) or type(error).__name__}")
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Let the workers release what they hold and end their processes; see `Executor.shutdown`.

        Raises:
            GirihError: a worker failed in its release; all processes have ended all the same.
        """
        watcher, self._watcher = self._watcher, None
        if watcher is None or os.getpid() != self._pid:
            return
        self._is_closing = True
        try:
            error = self._release()
        finally:
            self._end(watcher)
        if error is not None:
            raise error

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
        check_process(self._pid)

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
        check_process(self._pid)
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

    # ---- the start

    @abstractmethod
    def _prepare(self) -> None:
        """Make what the watcher and the workers share; if this raises, nothing was started."""

    def _launch(self) -> None:
        """Start processes that must be children of the watcher's thread; called there first."""

    @abstractmethod
    def _meet(self) -> str | None:
        """Start the processes, or await them; returns where the workers meet, None for a lone one."""

    # ---- the watcher's thread

    def _watch(self) -> None:
        try:
            self._launch()
            while not self._has_ended:
                self._look()
        except BaseException as error:
            logger.exception("the watcher of the workers failed")
            self._calls.fail(f"their watcher failed: {type(error).__name__}: {error}")

    def _look(self) -> None:
        """Sleep until something happens or time is up, and deal with it."""
        self._sleeps_until = float("inf")  # calls that come from here on wake this thread
        now = time.monotonic()
        self._sleeps_until = min(self._calls.next_deadline(), now + WATCH_INTERVAL_S)
        self._take_news(max(0.0, self._sleeps_until - now))
        call = self._calls.overdue() if time.monotonic() >= self._sleeps_until else None
        if call is not None:
            self._fail_overdue(call)

    @abstractmethod
    def _take_news(self, timeout_s: float) -> None:
        """Wait so long for answers and ends of workers, and tell the calls."""

    def _fail_overdue(self, call: Call) -> None:
        """Fail everything, as the time of a call is up."""
        text = f"{call.method} did not return within {call.limit_s:g} s"
        self._calls.fail(f"{name_ranks(call.silent)}: {text}{self._describe_stopped()}")

    def _describe_stopped(self) -> str:
        """Say which workers were stopped by a signal, as the end of a sentence; nothing if none is known."""
        return ""

    # ---- the end

    @abstractmethod
    def _end(self, watcher: threading.Thread) -> None:
        """End the processes and the watcher, which may never have begun; in any state, in bounded time."""

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
