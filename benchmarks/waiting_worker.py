"""A worker that waits instead of computing: a device whose steps take a given time and none of the processor's.

Its model's config.json says how long: `step_ms`. All else is as with a real worker: specs from config.json, steps in
order, a token for each row that samples.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from girih.checkpoint.hf_config import load_config
from girih.config import EngineConfig
from girih.engine.expectations import expected_specs
from girih.kv.config import KVCacheConfig
from girih.kv.spec import KVCacheSpec
from girih.messages import StepInput, StepOutput


class WaitingWorker:
    """One worker without a model.

    Args:
        config: the engine's options.
        rank: of this worker.
        rendezvous: where workers meet; not needed.
    """

    def __init__(self, config: EngineConfig, rank: int, rendezvous: str | None = None):
        model_config = load_config(Path(config.model))
        self.specs = expected_specs(config, model_config)[rank]
        self.step_s = model_config["step_ms"] / 1000
        self.vocab_size = model_config["vocab_size"]
        self.step_times_s: list[float] = []

    def load_model(self) -> None:
        """There is none."""

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Return what config.json says."""
        return self.specs

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> list[int]:
        """Allocate nothing; return the planned blocks, per group."""
        return [kv_cache_config.num_blocks(group) for group in range(len(kv_cache_config.groups))]

    def compile_or_warm_up_model(self) -> None:
        """There is nothing to warm up."""

    def release_slabs(self, slabs: np.ndarray) -> None:
        """There is no memory to give back."""

    def execute_model(self, step: StepInput) -> StepOutput:
        """Wait, and sample a token for each row."""
        start = time.perf_counter()
        if self.step_s:
            time.sleep(self.step_s)
        rows = step.rows[step.samples]
        token_ids = ((rows + step.step_id) % self.vocab_size).astype(np.int32)
        output = StepOutput(step.step_id, rows, token_ids)
        self.step_times_s.append(time.perf_counter() - start)
        return output

    def take_step_times(self) -> list[float]:
        """Return how long each step since the last call took here, in seconds."""
        step_times_s, self.step_times_s = self.step_times_s, []
        return step_times_s

    def shutdown(self) -> None:
        """There is nothing to release."""
