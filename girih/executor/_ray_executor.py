"""`RayExecutor`: calls go to actors as Ray's own, in order; their futures, and those of the actors' ends, come back.

engine core  --- one message per call, to each actor --->  actor 0, actor 1, ...
watcher: a thread that takes in answers and ends, one after another, and keeps the time
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from girih.errors import ExecutorError
from girih.executor._frames import HEADER, Buffer, Message
from girih.executor._ray_connection import CONNECTION
from girih.executor._ray_workers import RayWorkers
from girih.executor._remote import RemoteExecutor, read_answer

logger = logging.getLogger(__name__)

BLAME_S = 0.3
"""How long an error of one worker waits for the news that another one has ended, which would explain it."""

END_TIMEOUT_S = 10.0
"""How long Ray gets to end the actors."""


@dataclass(frozen=True)
class News:
    """What an actor said, or that it has ended.

    Args:
        rank: of its worker.
        tag: of the call; None for the end.
        future: done.
    """

    rank: int
    tag: int | None
    future: Future[Any]


class RayExecutor(RemoteExecutor):
    """Runs workers in actors; see the module, and `RemoteExecutor` for the arguments."""

    workers_are_local = False

    # ---- the start

    def _prepare(self) -> None:
        """Connect to Ray."""
        CONNECTION.join(len(self._ranks))
        self._workers = RayWorkers(len(self._ranks))
        self._inbox: queue.SimpleQueue[News | None] = queue.SimpleQueue()

    def _meet(self) -> str | None:
        """Make the actors."""
        for rank, end in enumerate(self._workers.start()):
            end.add_done_callback(functools.partial(_pass_on, self._inbox, rank, None))
        return self._workers.rendezvous

    # ---- sending

    def _send(self, method: str, tag: int, parts: Sequence[Buffer], limit_s: float) -> None:
        """Hand a message to Ray, which takes it at once."""
        try:
            answers = self._workers.send(b"".join(parts))
        except Exception as error:  # Ray raises many kinds
            self._calls.fail(f"{method} could not be sent: {type(error).__name__}: {error}")
            return
        for rank, answer in enumerate(answers):
            answer.add_done_callback(functools.partial(_pass_on, self._inbox, rank, tag))

    def _stop_sending(self) -> None:
        """Do nothing, as sending does not wait."""

    def _wake_watcher(self) -> None:
        self._inbox.put(None)

    # ---- the watcher's thread

    def _take_news(self, timeout_s: float) -> None:
        news = self._next(timeout_s)
        if news is not None:
            self._take_in(news, BLAME_S)

    def _next(self, timeout_s: float) -> News | None:
        try:
            return self._inbox.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None

    def _take_in(self, news: News, patience_s: float) -> None:
        """Take in an answer or an end; an error first waits for the end that may explain it."""
        failure = news.future.exception()
        if failure is not None:
            self._calls.fail(self._workers.describe_end(news.rank, failure))
            return
        data = news.future.result()
        if news.tag is None or not data:  # nobody waits for this answer
            return
        message = Message(data[: HEADER.size], bytearray(data[HEADER.size :]))
        value, error = read_answer(news.rank, message)
        if error is None:
            self._calls.answer(news.tag, news.rank, value)
            return
        is_alone = not isinstance(error, ExecutorError) or len(self._ranks) == 1
        others = [] if is_alone else self._await_end(patience_s)
        self._calls.error(news.tag, error)
        for other in others:
            self._take_in(other, 0.0)

    def _await_end(self, timeout_s: float) -> list[News]:
        """Wait for an actor's end, which fails everything; returns the other news of this time."""
        deadline, others = time.monotonic() + timeout_s, []
        while self._calls.failure is None and (left_s := deadline - time.monotonic()) > 0:
            news = self._next(left_s)
            if news is not None and news.future.exception() is not None:
                self._take_in(news, 0.0)
            elif news is not None:
                others.append(news)
        return others

    # ---- the end

    def _end(self, watcher: threading.Thread) -> None:
        self._calls.fail("they were shut down")
        self._has_ended = True
        self._wake_watcher()
        if watcher.is_alive():
            watcher.join()
        # on a thread of its own, as Ray waits long for a cluster that is gone
        ending = threading.Thread(target=self._workers.end, args=(END_TIMEOUT_S,), name="girih-ray-end", daemon=True)
        ending.start()
        ending.join(2 * END_TIMEOUT_S)
        if ending.is_alive():
            logger.error("the Ray cluster does not answer; it ends the workers when this process ends")
        CONNECTION.leave()


def _pass_on(inbox: queue.SimpleQueue[News | None], rank: int, tag: int | None, future: Future[Any]) -> None:
    """Pass news on from Ray's thread, which must not be held up; late news of old actors reach no new inbox."""
    inbox.put(News(rank, tag, future))
