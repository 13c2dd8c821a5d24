"""An engine core over a worker that waits: the time of a step that is neither the device's nor the scheduler's.

The core, its executor and all messages are real. The scheduler can be padded: it then takes a given time of the
processor per step, its own included, as that of a much larger engine would.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import girih.executor
from girih.config import EngineConfig
from girih.engine.core import EngineCore
from girih.messages import StepInput, StepOutput
from girih.request import SamplingParams
from girih.sched.scheduler import Scheduler
from girih.units import GIB

PROMPT_TOKENS = 16
MODEL = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1 << 20,
    "dtype": "bfloat16",
}


class PaddedScheduler:
    """A scheduler that takes longer; everything else is the scheduler's.

    Args:
        scheduler: the real one.
        step_s: seconds of `schedule` and `update` together, in one step.
    """

    def __init__(self, scheduler: Scheduler, step_s: float):
        self._scheduler = scheduler
        self._call_s = step_s / 2

    def schedule(self) -> StepInput | None:
        """Choose the work of the next step, for half of the time."""
        return self._padded(self._scheduler.schedule)

    def update(self, step: StepInput, output: StepOutput) -> None:
        """Take in the result of a step, for half of the time."""
        self._padded(self._scheduler.update, step, output)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def _padded(self, method: Callable[..., Any], *args: Any) -> Any:
        end = time.perf_counter() + self._call_s
        result = method(*args)
        while time.perf_counter() < end:  # busy, as the scheduler would be
            pass
        return result


class WaitingEngine:
    """A core over a worker that waits, with requests that decode for as long as they are asked to.

    Args:
        directory: where its model's config.json is written.
        executor: "uniproc" or "multiproc".
        is_async: the option `async_scheduling`.
        num_requests: that decode.
        num_steps: at most, all in all.
        step_ms: how long the worker waits in a step.
        scheduler_ms: what the scheduler is padded to; 0 leaves it as it is.
    """

    def __init__(
        self,
        directory: Path,
        executor: str,
        *,
        is_async: bool,
        num_requests: int,
        num_steps: int,
        step_ms: float,
        scheduler_ms: float,
    ):
        (directory / "config.json").write_text(json.dumps(MODEL | {"step_ms": step_ms}))
        self.core = EngineCore(
            EngineConfig(
                model=str(directory),
                executor=f"waiting_{executor}",
                async_scheduling=is_async,
                max_num_seqs=num_requests,
                max_num_batched_tokens=num_requests * PROMPT_TOKENS,
                max_model_len=PROMPT_TOKENS + num_steps + 8,
                kv_cache_memory_bytes=4 * GIB,  # none of it exists
            )
        )
        if scheduler_ms:
            self.core.scheduler = PaddedScheduler(self.core.scheduler, scheduler_ms / 1000)  # type: ignore[assignment]
        params = SamplingParams(max_tokens=num_steps + 8, ignore_eos=True, seed=0)
        for i in range(num_requests):
            prompt = [(i * PROMPT_TOKENS + j) % MODEL["vocab_size"] for j in range(PROMPT_TOKENS)]
            self.core.add_request(prompt, params)

    def measure(self, num_steps: int, warm_up: int) -> dict[str, float]:
        """Decode for some steps.

        Args:
            num_steps: that count.
            warm_up: before them; the first results may be of steps that were done while nobody looked.

        Returns:
            `step_ms`, from one step's end to the next's, and `worker_ms`, what a step took in the worker: the means.
        """
        for _ in range(warm_up):
            self.core.step()
        start = time.perf_counter()
        for _ in range(num_steps):
            (update,) = self.core.step()
            assert len(update.request_ids) == self.core.config.max_num_seqs, "somebody does not decode"
        seconds = time.perf_counter() - start
        (worker_s,) = self.core.executor.collective_rpc("take_step_times")  # after all steps that are under way
        return {"step_ms": seconds / num_steps * 1000, "worker_ms": statistics.mean(worker_s[-num_steps:]) * 1000}


@contextmanager
def waiting_engine(executor: str, **options: Any) -> Iterator[WaitingEngine]:
    """Make a `WaitingEngine` and shut it down in the end; the options are its own."""
    folder = str(Path(__file__).parent / "waiting_executors")
    girih.executor.__path__.append(folder)
    try:
        with TemporaryDirectory() as directory:
            engine = WaitingEngine(Path(directory), executor, **options)
            try:
                yield engine
            finally:
                engine.core.shutdown()
    finally:
        girih.executor.__path__.remove(folder)
