"""`EngineConfig`: everything a user may set, frozen and checked. A later decision is a new value, never a write."""

from __future__ import annotations

from dataclasses import dataclass

from girih import plugins
from girih.errors import ConfigError

QUANTIZATIONS = ("int8",)
"""Files in `girih/linear` that keep weights smaller than the checkpoint's; `girih.arch` counts their bytes."""

PLUGINS = {
    "scheduling_policy": ("girih.sched.policies", "scheduling policy"),
    "executor": ("girih.executor", "executor"),
    "device": ("girih.device", "device"),
    "attention_backend": ("girih.attention", "attention backend"),
}
"""Fields that name a file: in which package, and what it is."""

MAX_STEP_TIMEOUT_S = 7 * 86400.0


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The options of one engine; `LLM` and every command line build exactly this.

    Args:
        model: a directory in Hugging Face format, a .gguf file, or a name that `girih pull` knows.
        dtype: "auto" (as the checkpoint says), "float32" or "bfloat16"; of the weights.
        quantization: "int8" keeps weights as int8, a quarter of float32's memory, and computes with them, less exact.
        kv_cache_dtype: of keys and values: "auto" (as the weights), or "int8": half of bfloat16's memory, less exact.
        max_model_len: longest request in tokens, or "auto": about the longest that the model and memory allow.
        kv_cache_memory_bytes: size of each worker's KV cache, e.g. 512MiB; left out, what is free is measured.
        memory_utilization: share of a machine's memory (or of its cgroup limit) that all workers on it may use in all.
        max_num_seqs: requests computed at once.
        max_num_batched_tokens: tokens computed in one step.
        block_size: tokens per cache block; left out: the smallest multiple of 16 the backend supports.
        enable_prefix_caching: reuse the cached KV of equal prefixes.
        scheduling_policy: a file in `girih/sched/policies`.
        executor: uniproc (one worker, in this process), multiproc (processes here) or ray (actors of a Ray cluster).
        device: a file in `girih/device`.
        attention_backend: a file in `girih/attention`, e.g. "reference", or "auto": the device's choice.
        tensor_parallel_size: workers that share each layer; their number must divide the model's query heads.
        pipeline_parallel_size: stages, each with its share of the layers, on so many workers.
        pipeline_split: layers of each stage, e.g. 10,8; left out: dealt out evenly.
        seed: where the seeds of requests without one start.
        async_scheduling: prepare the next step while the workers compute one.
        step_timeout_s: seconds that a step may take; workers that need longer have failed.
        restart_workers: when a worker fails in a step, start new ones that compute all requests again: none fails.
        kv_events: keep a record of the prefixes that become cached and of those that are gone, for routers.
        check_invariants: run the cache manager's `check()` after every step (slow; tests and debugging).
    """

    model: str
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    max_model_len: int | str = "auto"
    kv_cache_memory_bytes: int | None = None
    memory_utilization: float = 0.5
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int | None = None
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    executor: str = "uniproc"
    device: str = "cpu"
    attention_backend: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    pipeline_split: tuple[int, ...] | None = None
    seed: int = 0
    async_scheduling: bool = True
    step_timeout_s: float = 600.0
    restart_workers: bool = False
    kv_events: bool = False
    check_invariants: bool = False

    @property
    def world_size(self) -> int:
        """Return how many workers there are."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def max_steps_under_way(self) -> int:
        """Return how many steps the workers may have at once: one in each pipeline stage, and always the next one."""
        return max(2, self.pipeline_parallel_size) if self.async_scheduling else 1

    @property
    def cache_dtype(self) -> str:
        """Return what keys and values are stored as: "auto", as the checkpoint says, or a dtype name."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def memory_option(self) -> str:
        """Return the option that sets the KV cache's memory, or those that would."""
        given = self.kv_cache_memory_bytes is not None
        return "--kv-cache-memory" if given else "--kv-cache-memory or --memory-utilization"

    def __post_init__(self) -> None:
        """Refuse values that no engine could run with, naming the option and what it takes."""
        _check_names(self)
        for name in ("max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size", "pipeline_parallel_size"):
            _check_positive(name, getattr(self, name))
        for name in ("block_size", "kv_cache_memory_bytes"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        if self.max_model_len != "auto":
            _check_positive("max_model_len", self.max_model_len, or_else=' or "auto"')
        if not 0 < self.memory_utilization <= 1:
            raise ConfigError(f"memory_utilization={self.memory_utilization!r} must be above 0 and at most 1")
        if not isinstance(self.step_timeout_s, (int, float)) or not 0 < self.step_timeout_s <= MAX_STEP_TIMEOUT_S:
            limit = f"above 0 and at most {MAX_STEP_TIMEOUT_S:.0f} (a week)"
            raise ConfigError(f"step_timeout_s={self.step_timeout_s!r} must be a number of seconds {limit}")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigError(f"dtype={self.dtype!r} is not supported; choose auto, float32 or bfloat16")
        if self.kv_cache_dtype not in ("auto", "int8"):
            raise ConfigError(f"kv_cache_dtype={self.kv_cache_dtype!r} is not supported; choose auto or int8")
        if self.quantization not in (None, *QUANTIZATIONS):
            known = ", ".join(QUANTIZATIONS)
            raise ConfigError(f"quantization={self.quantization!r} is not supported; choose {known}, or leave it out")
        if self.pipeline_split is not None:
            object.__setattr__(self, "pipeline_split", tuple(self.pipeline_split))  # a list will do
            for num_layers in self.pipeline_split:
                _check_positive("pipeline_split", num_layers, or_else=" layer for each stage")
        if self.world_size > 1 and self.executor == "uniproc":
            raise ConfigError(
                f"--tensor-parallel-size {self.tensor_parallel_size} with --pipeline-parallel-size "
                f"{self.pipeline_parallel_size} needs {self.world_size} workers, the executor uniproc has one: choose "
                "--executor multiproc or ray, or set both sizes to 1"
            )


def _check_names(config: EngineConfig) -> None:
    for field, (package, what) in PLUGINS.items():
        name = getattr(config, field)
        if (field, name) != ("attention_backend", "auto"):
            plugins.check(package, name, what=what)


def _check_positive(name: str, value: object, or_else: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r} must be a whole number of at least 1{or_else}")
