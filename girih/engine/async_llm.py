"""`AsyncLLM`: the engine for servers. It runs in a process of its own; requests are followed from one event loop.

    submit ──> LiveRequest ──(socket)──> the engine's process: step, step, step
                    ^                                   │
                    └── tokens become text <── news ────┘

What a request has brought so far is kept in its `RequestOutput`, never as a queue of pieces, so a client that reads
slowly costs no memory. All methods are to be called from the loop that `start` ran in.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from girih import arch
from girih.checkpoint.hf_config import load_config
from girih.checkpoint.resolve import resolve_model
from girih.checkpoint.tokenizer import Tokenizer
from girih.config import EngineConfig
from girih.engine.core_client import CoreClient
from girih.engine.core_messages import AbortRequests, AddRequest, FromCore, Ready, Refused, StepDone
from girih.engine.input_processing import TokenizedPrompt, check_grammar, check_salt, split_completions
from girih.engine.live_request import LiveRequest
from girih.engine.output_processing import OutputProcessor
from girih.engine.timings import Timings
from girih.errors import EngineDiedError, GirihError
from girih.kv.events import KVEvents
from girih.request import SamplingParams, output_room
from girih.sched.updates import RequestUpdate, StepUpdate

logger = logging.getLogger(__name__)

MAX_FRUITLESS_RUNS = 5
"""Engines that may die while a request runs, without a token of it, before it is taken for the reason."""


class AsyncLLM:
    """One engine in a process of its own, and the requests that it works on.

    Args:
        config: the engine's options.
        restart: when the process dies, start another one and compute again whatever was shown to nobody.

    Raises:
        GirihError: the model is not there, or its tokenizer cannot be read.
    """

    def __init__(self, config: EngineConfig, *, restart: bool = False):
        directory = resolve_model(config.model)
        self.config = dataclasses.replace(config, model=str(directory))
        self.tokenizer = Tokenizer.from_directory(directory)
        self.vocab_size: int = arch.parse_config(load_config(directory)).vocab_size
        self.num_restarts = 0
        self._restarts = restart
        self._outputs = OutputProcessor(self.tokenizer)
        self._live: dict[str, tuple[LiveRequest, int]] = {}  # by the id of each sequence; which completion it is
        self._core_ids = map(str, itertools.count())
        self._request_ids = map(str, itertools.count())
        self._next_seed = config.seed
        self._client: CoreClient | None = None  # None: not up
        self._dead: str | None = None
        self._has_stepped = False  # the engine that is up now
        self._progress_s = time.monotonic()
        self._timings = Timings()
        self._ended = asyncio.Event()
        self.on_kv_events: Callable[[KVEvents], None] | None = None
        """Told, with the option `kv_events`, what became of cached prefixes in every step."""

    # ---- its life

    async def start(self) -> None:
        """Bring the engine up.

        Raises:
            GirihError: it cannot be brought up; nothing is left running.
        """
        client = CoreClient(self.config)
        self._ready = await client.start()
        self._client = client
        self._listener = asyncio.create_task(self._listen())

    async def shutdown(self) -> None:
        """End the engine; requests that still run end with an error. A second call does nothing."""
        self._dead = self._dead or "the server was shut down"
        self.fail_all(self._dead)
        if hasattr(self, "_listener"):
            self._listener.cancel()
            await asyncio.wait((self._listener,))  # it may be starting another engine
        if self._client is not None:
            client, self._client = self._client, None
            await client.stop()
        self._ended.set()

    async def wait_until_dead(self) -> str:
        """Wait until the engine has ended for good; returns why."""
        await self._ended.wait()
        assert self._dead is not None
        return self._dead

    @property
    def ready(self) -> Ready:
        """Return what the engine said when it last came up: its plan, the longest request, times."""
        return self._ready

    @property
    def max_model_len(self) -> int:
        """Return the longest request in tokens, prompt and output."""
        return self._ready.max_model_len

    @property
    def is_up(self) -> bool:
        """Tell whether there is an engine; not while another one is started."""
        return self._client is not None and self._dead is None

    @property
    def engine_pid(self) -> int | None:
        """Return the number of the engine's process, None without one."""
        return None if self._client is None else self._client.pid

    @property
    def stalled_s(self) -> float:
        """Return for how many seconds there has been work and no step has ended; 0 without work."""
        return time.monotonic() - self._progress_s if self._live else 0.0

    @property
    def num_unfinished(self) -> int:
        """Return the sequences that wait or run."""
        return len(self._live)

    def take_timings(self) -> Timings:
        """Return how long things took since the last call."""
        timings, self._timings = self._timings, Timings()
        return timings

    def live_request(self, core_id: str) -> LiveRequest | None:
        """Return the request that a sequence of the engine core belongs to; None if it has ended.

        Args:
            core_id: the sequence, as `EngineCore.pool_map` names it.
        """
        live, _ = self._live.get(core_id, (None, 0))
        return live

    # ---- requests

    def submit(
        self,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        request_id: str | None = None,
        news: asyncio.Event | None = None,
    ) -> LiveRequest:
        """Queue one request.

        Args:
            prompt: its tokens.
            params: how to sample.
            priority: smaller is more important, for the scheduling policy "priority".
            cache_salt: cached prefixes are shared only between requests with the same salt.
            request_id: for its output; None takes a number.
            news: set whenever something of it changes; requests that are awaited together share one.

        Returns:
            The request, to be waited for.

        Raises:
            RequestError: it could never run.
            EngineDiedError: there is no engine any more.
        """
        if self._dead is not None:
            raise EngineDiedError(f"the engine takes no more requests: {self._dead}")
        check_salt(cache_salt)
        check_grammar(params.grammar)  # a server does so before, in a thread; what passed is remembered
        output_room(len(prompt.token_ids), self.max_model_len)
        children = split_completions(params, self.vocab_size, self._next_seed)
        if params.seed is None:
            self._next_seed += params.n
        live = LiveRequest(
            request_id or next(self._request_ids), prompt, params, children,
            priority=priority, cache_salt=cache_salt, news=news or asyncio.Event(),
        )  # fmt: skip
        if not self._live:
            self._progress_s = time.monotonic()
        self._begin(live)
        return live

    def abort(self, live: LiveRequest) -> None:
        """End a request that nobody waits for any more, and free its pages; one that has ended is no error."""
        if not live.output.finished:
            self._forget(live)
            self._timings.finished.append(live.times(time.monotonic()))
            live.wake()

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the engine core between two steps.

        Raises:
            GirihError: what it raises.
            EngineDiedError: there is no engine now.
        """
        if self._client is None:
            raise EngineDiedError("there is no engine now")
        return await self._client.call(method, *args)

    def _begin(self, live: LiveRequest) -> None:
        """Give a request to the engine; while there is none, it waits for the next one."""
        live.begin([next(self._core_ids) for _ in live.children])
        token_ids = np.array(live.prompt.token_ids, dtype=np.int32)
        for index, (core_id, params) in enumerate(zip(live.core_ids, live.children, strict=True)):
            self._live[core_id] = live, index
            self._outputs.add(core_id, live.output, index, params)
            if self._client is not None:
                self._client.send(AddRequest(core_id, token_ids, params, live.priority, live.cache_salt))

    def _forget(self, live: LiveRequest) -> None:
        unfinished = self._outputs.abort(live.core_ids)
        for core_id in live.core_ids:
            self._live.pop(core_id, None)
        self._drop(unfinished)

    def _drop(self, core_ids: Sequence[str]) -> None:
        if core_ids and self._client is not None:
            self._client.send(AbortRequests(tuple(core_ids)))

    def _fail(self, live: LiveRequest, error: str, *, refused: bool = False) -> None:
        self._forget(live)
        live.fail(error, refused=refused)
        self._timings.finished.append(live.times(time.monotonic()))

    def fail_all(self, error: str) -> None:
        """End every request with an error."""
        for live in self._unfinished():
            self._fail(live, error)

    def _unfinished(self) -> list[LiveRequest]:
        return list(dict.fromkeys(live for live, _ in self._live.values()))

    # ---- news

    async def _listen(self) -> None:
        try:
            while True:
                try:
                    assert self._client is not None
                    self._take_in(await self._client.receive())
                except EngineDiedError as error:
                    await self._start_again(str(error))
        except GirihError as error:  # for good
            self._dead = str(error)
        except Exception as error:
            logger.exception("the front end cannot go on")
            self._dead = f"an error in Girih: {type(error).__name__}: {error}"
        self.fail_all(self._dead)
        if self._client is not None:
            self._client.close()
            self._client = None
        self._ended.set()

    def _take_in(self, message: FromCore) -> None:
        match message:
            case StepDone(updates, died, kv_events):
                self._has_stepped = True
                began_s, self._progress_s = self._progress_s, time.monotonic()
                if kv_events is not None and self.on_kv_events is not None:
                    self.on_kv_events(kv_events)
                for update in updates:
                    self._apply(update if died is None else _without_failures(update), began_s)
            case Refused(request_id, error):
                if request_id in self._live:
                    self._fail(self._live[request_id][0], error, refused=True)

    def _apply(self, update: StepUpdate, began_s: float) -> None:
        self._drop(self._outputs.process(update))
        now_s = time.monotonic()
        for core_id in update.request_ids:
            if (found := self._live.get(core_id)) is not None:
                found[0].note(found[1], began_s, now_s, self._timings)
        for core_id in update.details:
            if (found := self._live.get(core_id)) is not None:
                found[0].note(found[1], began_s, now_s, None)
        for core_id in {*update.request_ids, *update.details}:
            self._leave_if_ended(core_id, now_s)

    def _leave_if_ended(self, core_id: str, now_s: float) -> None:
        live, index = self._live.get(core_id, (None, 0))
        if live is not None and live.output.outputs[index].finish_reason is not None:
            del self._live[core_id]
            if live.output.finished:
                self._timings.finished.append(live.times(now_s))

    async def _start_again(self, reason: str) -> None:
        """Start another engine, and give it what was shown to nobody; everything else ends with an error.

        Raises:
            GirihError: there will be no other engine.
        """
        assert self._client is not None
        self._client.close()
        self._client = None
        logger.error("the engine died: %s", reason)
        if not self._restarts:
            raise EngineDiedError(reason)
        for live in self._unfinished():
            may_run = live.may_run_again(MAX_FRUITLESS_RUNS, engine_has_stepped=self._has_stepped)
            if live.is_shown or not may_run:
                self._fail(live, reason)
        logger.warning("another engine is started")
        client = CoreClient(self.config)
        self._ready = await client.start()
        self._client = client
        self._has_stepped = False
        self.num_restarts += 1
        self._progress_s = time.monotonic()
        waiting = self._unfinished()
        logger.warning("another engine is up; %d requests are computed again", len(waiting))
        for live in waiting:
            self._forget(live)
            self._begin(live)


def _without_failures(update: StepUpdate) -> StepUpdate:
    """Return an update without the requests that end because there is no engine any more: that is seen to elsewhere."""
    kept: dict[str, RequestUpdate] = {
        core_id: details for core_id, details in update.details.items() if details.finish_reason != "error"
    }
    return StepUpdate(update.request_ids, update.token_ids, kept)
