"""What `girih bench` measures of a running engine: greedy, on random prompts, and no request ends early."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from girih.errors import ConfigError, RequestError
from girih.request import SamplingParams

if TYPE_CHECKING:
    from girih.engine.core import EngineCore
    from girih.engine.llm import LLM

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""

Figures = dict[str, Any]
"""What was found, ready for JSON; times in seconds."""

WARM_UP_TOKENS = 2
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Work:
    """Requests that are alike.

    Args:
        requests: how many.
        input_tokens: of each prompt.
        output_tokens: of each answer.
    """

    requests: int
    input_tokens: int
    output_tokens: int

    def check(self, max_model_len: int, model_limit: int) -> None:
        """Refuse requests that are longer than the engine takes.

        Args:
            max_model_len: the longest request that it takes, in tokens.
            model_limit: the same of any engine with this model.

        Raises:
            ConfigError: they are.
        """
        if self.input_tokens + self.output_tokens > max_model_len:
            limit = f"this engine takes {max_model_len}, the model {model_limit}"
            remedy = "lower them, or raise --max-model-len or --kv-cache-memory"
            if max_model_len == model_limit:
                limit, remedy = f"the model's own limit is {model_limit}", "lower them"
            raise ConfigError(
                f"--input {self.input_tokens} and --output {self.output_tokens} make requests of "
                f"{self.input_tokens + self.output_tokens} tokens; {limit}: {remedy}"
            )


def measure_throughput(llm: LLM, progress: Progress, *, work: Work, rounds: int, profile: bool) -> Figures:
    """Serve all requests at once, several times; a short request before that does not count.

    Args:
        llm: the engine.
        progress: told of finished requests.
        work: of every round; the prompts are others each time, so that no round finds those of another cached.
        rounds: how often.
        profile: do it once more, and find where the workers' time goes.

    Raises:
        GirihError: a request that is too long, or that the engine could not serve.
    """
    work.check(llm.max_model_len, llm.core.model_limit)
    _warm_up(llm.core, work, progress)
    found = [_timed_round(llm, work, i, f"round {i} of {rounds}", progress) for i in range(1, rounds + 1)]
    return {
        **vars(work),
        "rounds": found,
        **{name: spread([entry[name] for entry in found]) for name in ("output_tokens_per_s", "total_tokens_per_s")},
        "profile": _profile(llm, work, rounds + 1, progress) if profile else None,
    }


def measure_latency(llm: LLM, progress: Progress, *, work: Work, concurrency: int) -> Figures:
    """Serve so many requests at a time, each coming when another has ended, and time every token.

    Args:
        llm: the engine.
        progress: told of finished requests.
        work: all requests; a short one before them does not count.
        concurrency: requests in progress at any time.

    Raises:
        GirihError: a request that is too long, or that the engine could not serve.
    """
    work.check(llm.max_model_len, llm.core.model_limit)
    _warm_up(llm.core, work, progress)
    prompts = _prompts(llm.core, work, stream=1)
    start = time.perf_counter()
    times = _serve(llm.core, prompts, work.output_tokens, concurrency, lambda *done: progress("measuring", *done))
    seconds = time.perf_counter() - start
    gaps = [later - earlier for one in times for earlier, later in itertools.pairwise(one[1:])]
    requests = [
        {
            "time_to_first_token_s": one[1] - one[0],
            "time_per_output_token_s": (one[-1] - one[1]) / (len(one) - 2) if len(one) > 2 else None,
            "seconds": one[-1] - one[0],
        }
        for one in times
    ]
    return {
        **vars(work),
        "concurrency": concurrency,
        "time_to_first_token_s": percentiles([one["time_to_first_token_s"] for one in requests]),
        "time_per_output_token_s": percentiles([one["time_per_output_token_s"] for one in requests]) if gaps else None,
        "time_between_tokens_s": percentiles(gaps) if gaps else None,
        "request_s": percentiles([one["seconds"] for one in requests]),
        "output_tokens_per_s": sum(len(one) - 1 for one in times) / seconds,
        "requests_measured": requests,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median of values, the least and the greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def percentiles(values: Sequence[float | None]) -> dict[str, float]:
    """Return the mean of values and what so many of a hundred stay at or below, e.g. "p90"."""
    found = np.asarray(values, np.float64)
    return {"mean": float(found.mean()), **{f"p{p}": float(np.percentile(found, p)) for p in PERCENTILES}}


def _timed_round(llm: LLM, work: Work, number: int, stage: str, progress: Progress) -> dict[str, float]:
    """Serve all requests at once, with prompts that the number decides."""
    prompts = _prompts(llm.core, work, stream=number)
    progress(stage, 0, work.requests)
    start = time.perf_counter()
    outputs = llm.generate(prompts, _params(work.output_tokens), progress=lambda *done: progress(stage, *done))
    seconds = time.perf_counter() - start
    for output in outputs:
        if output.error is not None:
            raise RequestError(output.error)
    output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "seconds": seconds,
        "output_tokens_per_s": output_tokens / seconds,
        "total_tokens_per_s": (work.requests * work.input_tokens + output_tokens) / seconds,
    }


def _profile(llm: LLM, work: Work, number: int, progress: Progress) -> list[dict[str, Any]]:
    """Return, for each worker by rank, its steps in one more round and the seconds of their parts."""
    call_workers = llm.core.executor.collective_rpc
    call_workers("start_profile")
    try:
        _timed_round(llm, work, number, "round with a profile", progress)
    finally:
        found = call_workers("stop_profile")
    return [{"num_steps": times.num_steps, "seconds": times.seconds} for times in found]


def _params(output_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True, seed=0)


def _prompts(core: EngineCore, work: Work, stream: int) -> list[list[int]]:
    """Draw the prompts of one round; `stream` tells rounds apart."""
    rng = np.random.default_rng([core.config.seed % (1 << 63), stream])
    return rng.integers(0, core.vocab_size, (work.requests, work.input_tokens)).tolist()


def _warm_up(core: EngineCore, work: Work, progress: Progress) -> None:
    prompts = _prompts(core, Work(1, work.input_tokens, work.output_tokens), stream=0)
    _serve(core, prompts, min(work.output_tokens, WARM_UP_TOKENS), 1, lambda *done: progress("warm-up", *done))


def _serve(
    core: EngineCore,
    prompts: Sequence[list[int]],
    output_tokens: int,
    concurrency: int,
    progress: Callable[[int, int], None],
) -> list[list[float]]:
    """Return, for each request in the order in which they end, when it came and when each of its tokens was there."""
    waiting, running, ended = deque(prompts), dict[str, list[float]](), list[list[float]]()
    params = _params(output_tokens)
    progress(0, len(prompts))
    while waiting or running:
        while waiting and len(running) < concurrency:
            came = time.perf_counter()
            running[core.add_request(waiting.popleft(), params)] = [came]
        updates, now = core.step(), time.perf_counter()
        for update in updates:
            for request_id in update.request_ids:
                running[request_id].append(now)
            for request_id, details in update.details.items():
                if details.error is not None:
                    raise RequestError(details.error)
                if details.finish_reason is not None:
                    ended.append(running.pop(request_id))
                    progress(len(ended), len(prompts))
    return ended
