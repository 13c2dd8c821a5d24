"""What a front end and the engine's process say to each other.

    front end -> process     SetUp, then AddRequest, AbortRequests, Call, Stop
    process -> front end     Ready or StartFailed, then StepDone after every step, Refused, Answer

Each is sent without waiting for what the other side says to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from girih.config import EngineConfig
from girih.engine.report import StartupReport
from girih.executor._frames import SentError
from girih.kv.config import KVCacheConfig
from girih.kv.events import KVEvents
from girih.request import SamplingParams
from girih.sched.updates import StepUpdate


@dataclass(frozen=True)
class SetUp:
    """Bring the engine up.

    Args:
        config: its options.
    """

    config: EngineConfig


@dataclass(frozen=True)
class AddRequest:
    """Queue one sequence.

    Args:
        request_id: unique among all that this process is ever given.
        token_ids: int32 [n]; the prompt.
        params: with `seed` set.
        priority: smaller is more important, for policies that look at it.
        cache_salt: requests share cached prefixes only with the same salt.
    """

    request_id: str
    token_ids: np.ndarray
    params: SamplingParams
    priority: int
    cache_salt: str


@dataclass(frozen=True)
class AbortRequests:
    """Drop requests; one that has ended already is no error.

    Args:
        request_ids: of sequences.
    """

    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class Call:
    """Call a method of the engine core between two steps.

    Args:
        call_id: comes back in the `Answer`.
        method: its name.
        args: positional arguments.
    """

    call_id: int
    method: str
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Stop:
    """End the process in order, whatever still runs."""


ToCore: TypeAlias = SetUp | AddRequest | AbortRequests | Call | Stop


@dataclass(frozen=True)
class Ready:
    """The engine is up.

    Args:
        max_model_len: the longest request in tokens, prompt and output.
        startup_report: how long each phase took.
        kv_cache_configs: the plan of every worker, by rank.
        prefix_secret: 16 bytes that key the hashes of cached prefixes; with them a router finds a prompt in KV events.
    """

    max_model_len: int
    startup_report: StartupReport
    kv_cache_configs: list[KVCacheConfig]
    prefix_secret: bytes


@dataclass(frozen=True)
class StartFailed:
    """The engine could not be brought up; the process ends.

    Args:
        error: why.
    """

    error: SentError


@dataclass(frozen=True)
class StepDone:
    """A step is over, whether or not it brought news: who waits knows that the engine lives.

    Args:
        updates: what became known.
        died: why there will be no more steps, and the process ends; None while it goes on.
        kv_events: what became of cached prefixes, with the option `kv_events`; None for nothing.
    """

    updates: list[StepUpdate]
    died: str | None = None
    kv_events: KVEvents | None = None


@dataclass(frozen=True)
class Refused:
    """A request that the core did not take.

    Args:
        request_id: of the sequence.
        error: why.
    """

    request_id: str
    error: str


@dataclass(frozen=True)
class Answer:
    """What a `Call` returned.

    Args:
        call_id: of the call.
        value: what the method returned.
        error: what it raised for the user instead.
    """

    call_id: int
    value: Any = None
    error: SentError | None = None


FromCore: TypeAlias = Ready | StartFailed | StepDone | Refused | Answer
