"""A saturated pool whose requests come and go with the lengths of real conversations."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cache_driver import CHUNK_TOKENS, CacheDriver
from families import Family

from girih.kv import KVCacheConfig

LENGTHS_FILE = Path(__file__).parent / "data" / "conversation_lengths.csv"
LONGEST_UNSCALED = 8192
"""Conversations are cut to this length before they are scaled: 2 of 12,000 are longer."""


@dataclass(frozen=True)
class ChurnResult:
    """What a saturated pool looked like, step by step.

    Args:
        steps: steps in which somebody waited and did not fit.
        min_usable: the least live / held bytes of a step.
        mean_usable: the mean.
        mean_occupancy: mean of live bytes / bytes of the pool.
        mean_running: mean of the requests that run.
        finished: requests that ended.
        preempted: requests that had to give up their pages.
        moved_bytes_per_step: bytes copied within the pool.
    """

    steps: int
    min_usable: float
    mean_usable: float
    mean_occupancy: float
    mean_running: float
    finished: int
    preempted: int
    moved_bytes_per_step: float


def conversation_lengths() -> np.ndarray:
    """Return int64 [12000, 2]: prompt and output tokens of real conversations."""
    with LENGTHS_FILE.open() as file:
        rows = csv.reader(line for line in file if not line.startswith("#"))
        next(rows)
        return np.array([[int(value) for value in row] for row in rows], dtype=np.int64)


class Requests:
    """An endless supply of requests.

    Args:
        scale: both lengths of every conversation are multiplied by this.
        longest: in tokens; the prompt is cut so that at least one token of output is left.
        seed: of the order.
    """

    def __init__(self, scale: int, longest: int, seed: int):
        lengths = np.maximum(conversation_lengths(), 1) * scale
        lengths[:, 0] = np.minimum(lengths[:, 0], longest - 1)
        lengths[:, 1] = np.minimum(lengths[:, 1], longest - lengths[:, 0])
        self.lengths = lengths
        self._rng = np.random.default_rng(seed)
        self._in_flight = lengths[:, 1] / lengths[:, 1].sum()

    def draw(self) -> tuple[int, int]:
        """Return (prompt tokens, prompt and output tokens) of a new request."""
        prompt, output = self.lengths[self._rng.integers(len(self.lengths))]
        return int(prompt), int(prompt + output)

    def draw_in_flight(self) -> tuple[int, int, int]:
        """Return (prompt, known, all tokens) of a request seen at some moment of a long run.

        The longer a request decodes the likelier it is seen; how far it has come is uniform.
        """
        prompt, output = self.lengths[self._rng.choice(len(self.lengths), p=self._in_flight)]
        return int(prompt), int(prompt + self._rng.integers(output)), int(prompt + output)


@dataclass(frozen=True)
class _Waiting:
    serial: int
    num_prompt: int
    num_known: int
    num_total: int


class Churn:
    """The loop: decode, prefill, admit while there is room, measure, finish.

    Args:
        family: the model.
        config: its plan.
        scale: of the conversations' lengths.
        seed: of their order.
    """

    def __init__(self, family: Family, config: KVCacheConfig, scale: int, seed: int = 0):
        longest = min(LONGEST_UNSCALED * scale, config.max_model_len)
        self.family, self.config = family, config
        self.requests = Requests(scale, longest, seed)
        seen = [self.requests.draw_in_flight()[1] for _ in range(500)]
        expected = config.pool_bytes / float(np.mean(family.live_bytes(np.array(seen))))
        max_num_seqs = int(2 * expected) + 64
        self.driver = CacheDriver(config, max_num_seqs, longest)
        self.budget = max(CHUNK_TOKENS, 2 * max_num_seqs)
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_total = np.zeros(max_num_seqs, dtype=np.int64)
        self.queue: list[_Waiting] = []
        """Preempted requests and the one that was refused last; the last of the list is the next."""
        self.num_drawn = self.finished = self.preempted = 0
        self.usable: list[float] = []
        self.occupancy: list[float] = []
        self.running: list[int] = []

    def run(self, num_steps: int) -> ChurnResult:
        """Fill the pool with requests that are somewhere on their way, then measure this many steps."""
        while self._admit(self._next(in_flight=True), budget=None):
            pass
        moved_before = self.driver.moved_bytes
        for _ in range(num_steps):
            self._step()
        assert self.usable, "the pool was never saturated"
        return ChurnResult(
            steps=len(self.usable),
            min_usable=min(self.usable),
            mean_usable=float(np.mean(self.usable)),
            mean_occupancy=float(np.mean(self.occupancy)),
            mean_running=float(np.mean(self.running)),
            finished=self.finished,
            preempted=self.preempted,
            moved_bytes_per_step=(self.driver.moved_bytes - moved_before) / num_steps,
        )

    def _step(self) -> None:
        driver = self.driver
        scheduled = np.zeros(len(self.num_total), dtype=np.int64)
        room = self._decode(scheduled)
        room = self._prefill(scheduled) and room
        saturated = not room
        while room and scheduled.sum() < self.budget:
            request = self._next()
            room = self._admit(request, budget=int(self.budget - scheduled.sum()), scheduled=scheduled)
            saturated = not room
        rows = driver.rows[scheduled[driver.rows] > 0]
        counts = scheduled[rows]
        if saturated:
            self._measure(scheduled)
        driver.compute(rows, counts)
        done = rows[driver.num_known[rows] >= self.num_total[rows]]
        self.finished += len(done)
        driver.free(done)

    def _measure(self, scheduled: np.ndarray) -> None:
        rows = self.driver.rows
        live = float(self.family.live_bytes(self.driver.num_computed(rows), scheduled[rows]).sum())
        assert len(rows) < len(self.num_total), "rows ran out before pages did"
        self.usable.append(live / self.driver.held_bytes())
        self.occupancy.append(live / self.config.pool_bytes)
        self.running.append(len(rows))

    def _decode(self, scheduled: np.ndarray) -> bool:
        """Reserve one token for each row whose prompt is computed; the newest rows give way. Tell if all had room."""
        driver, room = self.driver, True
        rows = driver.rows[driver.num_known[driver.rows] - driver.num_computed(driver.rows) == 1]
        served = 0
        while served < len(rows):
            served += driver.reserve(rows[served:], np.ones(len(rows) - served, dtype=np.int64))
            if served < len(rows):
                room = False
                newest = int(driver.rows[-1])
                self._preempt(newest)
                rows = rows[rows != newest]
        scheduled[rows] = 1
        return room

    def _prefill(self, scheduled: np.ndarray) -> bool:
        """Go on with prompts in progress; tell whether each got a chunk."""
        driver = self.driver
        rows = driver.rows
        for row in rows[driver.num_known[rows] - driver.num_computed(rows) > 1].tolist():
            left = int(driver.num_known[row] - driver.num_computed(np.array([row]))[0])
            if not self._chunk(row, min(left, CHUNK_TOKENS), scheduled):
                return False
        return True

    def _admit(self, request: _Waiting, budget: int | None, scheduled: np.ndarray | None = None) -> bool:
        """Let a request run, and schedule its first chunk (or, without a budget, compute all it knows)."""
        row = self.driver.admit(request.serial, request.num_known, request.num_prompt)
        if row is None:
            self.queue.append(request)
            return False
        self.num_prompt[row], self.num_total[row] = request.num_prompt, request.num_total
        if scheduled is None or budget is None:
            served = self.driver.prefill(row)
        else:
            left = int(request.num_known - self.driver.num_computed(np.array([row]))[0])
            served = self._chunk(row, min(left, CHUNK_TOKENS, budget), scheduled)
        if not served:
            self._preempt(row)
        return served

    def _chunk(self, row: int, limit: int, scheduled: np.ndarray) -> bool:
        chunk = self.driver.manager.max_new_tokens(row, limit)
        if chunk == 0 or self.driver.reserve(np.array([row]), np.array([chunk])) == 0:
            return False
        scheduled[row] = chunk
        return True

    def _next(self, in_flight: bool = False) -> _Waiting:
        if self.queue:
            return self.queue.pop()
        prompt, known, total = self.requests.draw_in_flight() if in_flight else _fresh(*self.requests.draw())
        self.num_drawn += 1
        return _Waiting(self.num_drawn, prompt, known, total)

    def _preempt(self, row: int) -> None:
        serial, known = int(self.driver.serial[row]), int(self.driver.num_known[row])
        self.queue.append(_Waiting(serial, int(self.num_prompt[row]), known, int(self.num_total[row])))
        self.driver.free(np.array([row]))
        self.preempted += 1


def _fresh(prompt: int, total: int) -> tuple[int, int, int]:
    return prompt, prompt, total
