"""The calls that workers have not answered yet: who still has to, until when, and whether workers can be used at all.

A call to all workers ends when each has answered. A step ends with the output of one; of the others only errors
are heard. The first error ends a call. Knows nothing of processes; several threads may use it.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from girih.errors import ExecutorError, GirihError
from girih.executor._base import Answer


@dataclass
class Call:
    """One call under way.

    Args:
        method: its name.
        ranks: whose answers make the result, in this order.
        limit_s: seconds until it has failed.
        is_step: whether the result is the one answer, and the limit counts from when the step before has ended.
        future: of the result.
        answers: rank -> answer, as far as they have come.
        deadline: when it has failed, on the clock of `time.monotonic`.
    """

    method: str
    ranks: Sequence[int]
    limit_s: float
    is_step: bool
    future: Answer
    answers: dict[int, Any] = field(default_factory=dict)
    deadline: float = 0.0

    @property
    def silent(self) -> list[int]:
        """Return the ranks whose answers are missing."""
        return [rank for rank in self.ranks if rank not in self.answers]

    def result(self) -> Any:
        """Return the result of a call that has all its answers."""
        return self.answers[self.ranks[0]] if self.is_step else [self.answers[rank] for rank in self.ranks]


class Calls:
    """All calls under way, oldest first.

    Args:
        on_failure: called when the workers cannot be used any more, before anybody is told; must not wait.
        num_workers: that there are.
    """

    def __init__(self, on_failure: Callable[[], None], num_workers: int) -> None:
        self._on_failure = on_failure
        self._is_alone = num_workers == 1
        self._lock = threading.Lock()
        self._failure: str | None = "they were not started"
        self._pending: dict[int, Call] = {}
        self._failed_tags: set[int] = set()
        self._num_calls = 0

    @property
    def failure(self) -> str | None:
        """Return why the workers cannot be used; None if they can."""
        return self._failure

    def open(self) -> None:
        """Take calls from now on."""
        self._failure = None

    def check(self) -> None:
        """Return if calls are taken.

        Raises:
            ExecutorError: they are not; says why.
        """
        if self._failure is not None:
            raise ExecutorError(f"the workers cannot be used: {self._failure}")

    def add(self, method: str, ranks: Sequence[int], limit_s: float, *, is_step: bool = False) -> tuple[int, Call]:
        """Enter a call.

        Returns:
            Its tag, unique, and the call.

        Raises:
            ExecutorError: no calls are taken.
        """
        future = Answer(functools.partial(self._give_up, method))
        future.set_running_or_notify_cancel()  # what is handed out cannot be taken back
        call = Call(method, ranks, limit_s, is_step, future, deadline=time.monotonic() + limit_s)
        with self._lock:
            self.check()
            self._num_calls += 1
            self._pending[self._num_calls] = call
            return self._num_calls, call

    def answer(self, tag: int, rank: int, value: Any) -> None:
        """Take in the answer of one rank; the last one ends the call."""
        with self._lock:
            call = self._pending.get(tag)
            if call is None or rank not in call.ranks:
                return
            call.answers[rank] = value
            if call.silent:
                return
            self._remove(tag)
        call.future.set_result(call.result())

    def error(self, tag: int, error: GirihError) -> None:
        """Take in an error of one rank, which ends the call.

        Nothing goes on after an error behind a good result, as this rank lacks what the others have; nor, with several
        workers, after one of a step, in the middle of which others may wait for this rank.
        """
        with self._lock:
            call = self._remove(tag)
            is_news = tag not in self._failed_tags
            self._failed_tags.add(tag)
        if call is not None:
            if call.is_step and not self._is_alone:
                self.fail(str(error))
            call.future.set_exception(error)
        elif is_news:
            self.fail(str(error))

    def fail(self, reason: str) -> None:
        """End all calls, and take no more; the first reason stays."""
        with self._lock:
            if self._failure is None:
                self._failure = reason
                self._on_failure()
            pending, self._pending = self._pending, {}
            self._failed_tags.update(pending)
        for call in pending.values():
            call.future.set_exception(ExecutorError(reason))

    def next_deadline(self) -> float:
        """Return when the first call will have failed; infinite if none is under way."""
        with self._lock:
            return min((call.deadline for call in self._timed()), default=float("inf"))

    def overdue(self) -> Call | None:
        """Return a call whose time is up."""
        now = time.monotonic()
        with self._lock:
            return next((call for call in self._timed() if call.deadline <= now), None)

    def _timed(self) -> Iterator[Call]:
        """Yield the calls whose time counts: all but steps behind others."""
        return (call for i, call in enumerate(self._pending.values()) if i == 0 or not call.is_step)

    def _remove(self, tag: int) -> Call | None:
        """Take a call out; the time of the step behind it begins to count."""
        call = self._pending.pop(tag, None)
        following = next(iter(self._pending.values()), None)
        if call is not None and following is not None and following.is_step:
            following.deadline = max(following.deadline, time.monotonic() + following.limit_s)
        return call

    def _give_up(self, method: str, timeout_s: float | None) -> None:
        self.fail(f"{method} did not return within {timeout_s:g} s")
