"""The engine core: brings everything up, then steps. It plans; workers only do as told.

A request lives from `add_request` to the update with its finish reason; one call of `step` moves all of them on. When a
step fails, its requests end with the error; or, with `restart_workers`, new workers compute them again.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait

import numpy as np

from girih import arch, plugins
from girih.checkpoint.hf_config import eos_token_ids, load_config
from girih.checkpoint.resolve import resolve_model
from girih.config import EngineConfig
from girih.engine.bring_up import bring_up, make_manager, make_scheduler
from girih.engine.checks import check_block_ids, check_config, warn_of_short_requests
from girih.engine.interrupts import uninterrupted
from girih.engine.pool_memory import PoolMemory
from girih.engine.pool_view import PageInfo, PoolView, describe_page, view_pool
from girih.engine.report import EngineStats, StartupReport
from girih.errors import ExecutorError, GirihError
from girih.executor._base import Executor
from girih.kv.events import KVEvents
from girih.kv.hashing import SECRET_BYTES
from girih.kv.manager import KVCacheManager
from girih.messages import StepInput, StepOutput
from girih.request import SamplingParams
from girih.sched.request_state import RequestState
from girih.sched.updates import StepUpdate

logger = logging.getLogger(__name__)

GRACE_S = 10.0
"""How much longer than a step may take its result is waited for: the executor knows better who is late."""


class EngineCore:
    """One model, its workers, its KV cache and its requests.

    Args:
        config: the options.
        startup_report: goes on with what was timed before; None starts one.

    Raises:
        GirihError: the engine cannot be brought up; nothing is left running.
    """

    def __init__(self, config: EngineConfig, startup_report: StartupReport | None = None):
        self.startup_report = startup_report or StartupReport()
        with self.startup_report.phase("find model"):
            self.model_directory = resolve_model(config.model)
            self.model_config = load_config(self.model_directory)
            self.model_limit: int = arch.load(self.model_config).max_model_len(self.model_config)
            self.vocab_size: int = arch.parse_config(self.model_config).vocab_size
            self._eos_token_ids = frozenset(eos_token_ids(self.model_directory))
        self.config = dataclasses.replace(config, model=str(self.model_directory))
        self.prefix_secret = os.urandom(SECRET_BYTES)  # of the hashes of cached prefixes
        self._request_ids = map(str, itertools.count())
        self._num_steps = self._num_restarts = 0
        self._in_flight: deque[tuple[StepInput, Future[StepOutput]]] = deque()  # in the order of the workers
        self.death: str | None = None  # why it takes no more requests
        self._failure: str | None = None  # of workers that will be started anew
        self._resized_bytes: int | None = None
        executor = plugins.load("girih.executor", config.executor, what="executor")
        self.executor: Executor = executor.create(self.config)
        try:
            manager = self._start_workers(self.startup_report)
            self.scheduler = make_scheduler(self.config, manager)
            warn_of_short_requests(self.max_model_len, self.model_limit, self.config)
            logger.info("start-up took %.3f s", self.startup_report.total_s)
        except BaseException:
            self.executor.shutdown()
            raise

    @property
    def max_model_len(self) -> int:
        """Return the longest request in tokens, prompt and output: the solved value of "auto"."""
        return self.scheduler.max_request_tokens

    def add_request(
        self,
        prompt_token_ids: Sequence[int] | np.ndarray,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        request_id: str | None = None,
    ) -> str:
        """Queue one sequence.

        Args:
            prompt_token_ids: at least one id, all within the vocabulary.
            params: with `seed` set; `n` is not looked at.
            priority: smaller is more important, for policies that look at it.
            cache_salt: requests share cached prefixes only with the same salt.
            request_id: unique in this engine, chosen by whoever chooses all of them; None takes the next number.

        Returns:
            Its id.

        Raises:
            RequestError: it could never run.
            ExecutorError: the engine is dead.
        """
        self._check_alive()
        request = RequestState(
            request_id=next(self._request_ids) if request_id is None else request_id,
            prompt_token_ids=np.array(prompt_token_ids, dtype=np.int32),
            sampling_params=params,
            max_output_tokens=self.max_model_len if params.max_tokens is None else params.max_tokens,
            eos_token_ids=frozenset() if params.ignore_eos else self._eos_token_ids,
            priority=priority,
            cache_salt=cache_salt,
        )
        self.scheduler.add(request)
        return request.request_id

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its pages at once.

        Returns:
            Whether it was still there; ending and aborting at the same time is no error.
        """
        return self.scheduler.abort(request_id)

    def has_unfinished(self) -> bool:
        """Tell whether any request waits or runs, or `step` has something to say."""
        return self.scheduler.has_unfinished() or self.scheduler.has_updates()

    def step(self) -> list[StepUpdate]:
        """Move requests on: hand out steps, so that the workers always have the next one, and take in the oldest.

        Returns:
            What became known.
        """
        with uninterrupted():
            self._launch()
        self._collect()
        if self._failure is not None and self.death is None:
            self._restart(self._failure)
        if self.death is not None:
            self.scheduler.fail_all(self.death)  # those that came while it died, or were there when it was shut down
        if self.config.check_invariants:
            self.scheduler.manager.check()
        if not self.scheduler.has_unfinished():
            self._collect_all()  # what was computed for a request that had ended already
            self._release_free_slabs()
        return self.scheduler.take_updates()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes.

        Returns:
            False, and nothing is forgotten, while requests run.
        """
        return self.scheduler.manager.reset_prefix_cache()

    def resize_kv_cache(self, memory_bytes: int) -> list[int]:
        """Let each worker's KV cache have so many bytes at most, in whole slabs, up to what was planned at start-up.

        Requests in progress go on; their output is cut to the longest request that can be served then, as it is when
        a request is added. Memory that is no longer used goes back to the system.

        Args:
            memory_bytes: for each worker.

        Returns:
            The bytes that each worker's KV cache has now, by rank.

        Raises:
            CapacityError: requests in progress need more; nothing has changed.
            ExecutorError: the engine is dead.
        """
        self._check_alive()
        self._collect_all()
        with uninterrupted():
            longest = max(2, self.scheduler.longest_request_tokens() + 1)
            self.scheduler.limit_requests(self._pool_memory.resize(memory_bytes, longest))
            self._resized_bytes = memory_bytes
            self._hand_out(self.scheduler.make_empty_step())  # pages have moved
        self._collect_all()
        self._check_alive()
        self._release_free_slabs()
        return self._pool_memory.total_bytes

    def stats(self) -> EngineStats:
        """Return what the engine is doing now."""
        moved_bytes = self._pool_memory.moved_bytes
        return EngineStats.of(self.scheduler, self._num_steps, self._num_restarts, moved_bytes)

    def pool_map(self) -> PoolView:
        """Return what every page of the pool is used for now, and by whom, and the numbers of `stats`."""
        return view_pool(self.scheduler, self.stats())

    def page_info(self, group: int, page: int) -> PageInfo:
        """Say who holds a page and for which tokens; as `describe_page`."""
        return describe_page(self.scheduler, group, page)

    def take_kv_events(self) -> KVEvents:
        """Return what became of cached prefixes since the last call; first "all cleared" whenever workers start."""
        return self.scheduler.manager.take_events()

    def shutdown(self) -> None:
        """Release the workers; the engine takes no more requests. A second call does nothing."""
        self.death = self.death or "it was shut down"
        self.executor.shutdown()

    # ---- bring-up, and once more

    def _start_workers(self, report: StartupReport) -> KVCacheManager:
        self.kv_cache_configs = bring_up(self.config, self.model_config, self.model_limit, self.executor, report)
        with report.phase("make cache manager"):
            manager = make_manager(self.config, self.kv_cache_configs, self.prefix_secret)
            self._pool_memory = PoolMemory(self.kv_cache_configs, manager, self.executor)
        return manager

    def _restart(self, reason: str) -> None:
        """Start new workers, plan and bind again, and let all requests be computed again from their tokens."""
        with uninterrupted():
            self._failure = None
            self.scheduler.stop_all(reason)
            logger.warning("the workers are started anew: %s", reason)
        report, moved_bytes = StartupReport(), self._pool_memory.moved_bytes
        try:
            self._shut_down_workers()
            check_config(self.model_directory, self.model_config)
            manager = self._start_workers(report)
        except Exception as error:
            self._die(f"{reason}; and new workers could not be started: {error or type(error).__name__}")
            self._shut_down_workers()
            return
        except BaseException:  # Ctrl-C: the next step tries again
            self._failure = reason
            self._shut_down_workers()
            raise
        with uninterrupted():
            self._pool_memory.moved_bytes = moved_bytes
            limit = manager.max_request_tokens
            if self._resized_bytes is not None:
                limit = self._pool_memory.resize(self._resized_bytes, longest_tokens=0)
            self.scheduler.start_over(manager, limit)
            self._num_restarts += 1
        logger.warning("the new workers were ready after %.1f s", report.total_s)
        if self.death is not None:  # another thread has shut the engine down meanwhile
            self._shut_down_workers()

    def _shut_down_workers(self) -> None:
        """Release workers of which one has failed: that others cannot release what they hold is no news."""
        try:
            self.executor.shutdown()
        except GirihError as error:
            logger.warning("the workers were not released in order: %s", error)

    # ---- one step

    def _launch(self) -> None:
        """Hand steps to the workers, until as many are under way as they can use."""
        while len(self._in_flight) < self.config.max_steps_under_way and self._failure is None and self.death is None:
            if (step := self.scheduler.schedule()) is None:
                return
            self._hand_out(step)

    def _hand_out(self, step: StepInput) -> None:
        try:
            check_block_ids(step, self.kv_cache_configs)
            self._pool_memory.count_moves(step.cache.moves)
            self._num_steps = step.step_id
            self._in_flight.append((step, self.executor.execute_model(step)))
        except BaseException as error:  # its requests count on pages that nobody will fill
            logger.exception("step %d could not be handed out", step.step_id)
            self._fail_step(str(error) or type(error).__name__)
            if not isinstance(error, Exception):
                raise

    def _collect(self) -> None:
        """Wait for the oldest step under way, if there is one, and take in its result."""
        if not self._in_flight:
            return
        step, future = self._in_flight[0]
        wait([future], self.config.step_timeout_s + GRACE_S)  # Ctrl-C may end this wait; the step stays under way
        with uninterrupted():
            self._take_in(step, future)

    def _collect_all(self) -> None:
        while self._in_flight:
            self._collect()

    def _take_in(self, step: StepInput, future: Future[StepOutput]) -> None:
        self._in_flight.popleft()
        try:
            output = future.result(0)
        except TimeoutError:  # and with that the executor knows
            limit_s = self.config.step_timeout_s + GRACE_S
            self._fail_step(f"execute_model did not return within {limit_s:g} s", can_go_on=False)
        except Exception as error:
            logger.exception("step %d failed", step.step_id)
            self._fail_step(str(error))
        else:
            self.scheduler.update(step, output)

    def _fail_step(self, error: str, *, can_go_on: bool = True) -> None:
        """Forget a failed step and those behind it; their requests end, unless new workers can go on with them."""
        self._in_flight.clear()
        try:
            self.executor.check_health()
        except ExecutorError as reason:
            can_go_on = False
            error = str(reason) if error in str(reason) else f"{error}; {reason}"
        if self.death is not None:
            return  # `step` tells all requests
        if self.config.restart_workers:
            self._failure = error
        elif can_go_on:
            self.scheduler.fail_running(error)
        else:
            self._die(error)

    def _die(self, reason: str) -> None:
        self.death = self.death or reason
        self.scheduler.fail_all(self.death)

    def _release_free_slabs(self) -> None:
        """Give free slabs' memory back; if the worker cannot even do that, its next step will say so."""
        if self.death is None and self._failure is None and not self._in_flight:
            try:
                self._pool_memory.release_free_slabs()
            except GirihError:
                logger.exception("free KV cache could not be given back to the system")

    def _check_alive(self) -> None:
        if self.death is not None:
            raise ExecutorError(f"this engine takes no more requests: {self.death}")
