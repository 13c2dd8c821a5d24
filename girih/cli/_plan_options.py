"""What `girih plan` takes beside the model: `PlanOptions`."""

from __future__ import annotations

from dataclasses import dataclass

from girih.config import QUANTIZATIONS, EngineConfig
from girih.errors import ConfigError

WEIGHT_DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "bfloat16", "float16", "float32", "int8", "float8_e4m3fn")
MAX_WORKERS = 1 << 16
STATE_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What `girih plan` takes beside the model; one command-line option per field.

    Args:
        memory: budget of each worker for weights and KV cache, e.g. 4GiB.
        kv_cache_memory: budget of each worker for the KV cache alone, e.g. 512MiB.
        memory_utilization: where no size is given, the share of this machine's memory that all workers together get.
        max_model_len: longest request in tokens, or auto.
        dtype: of the weights: auto, float32, bfloat16 or float16.
        quantization: int8 for weights of int8.
        kv_dtype: of keys and values: auto (as the weights), bfloat16, float16, float32, int8 or float8_e4m3fn.
        state_dtype: of recurrent states: float32, bfloat16 or float16.
        tensor_parallel_size: workers that share each layer.
        pipeline_parallel_size: stages, each with its share of the layers.
        pipeline_split: layers of each stage, e.g. 10,8; default: dealt out evenly.
        num_speculative_tokens: draft tokens per step; default 3 with a draft, else 0.
        block_size: tokens per block; default: the smallest that fits.
        users: requests at once to find the longest context for.
        context: length in tokens of the requests to count.
    """

    memory: int | None = None
    kv_cache_memory: int | None = None
    memory_utilization: float = EngineConfig.memory_utilization
    max_model_len: int | str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    kv_dtype: str = "auto"
    state_dtype: str = "float32"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    pipeline_split: tuple[int, ...] | None = None
    num_speculative_tokens: int | None = None
    block_size: int | None = None
    users: int | None = None
    context: int | None = None

    def __post_init__(self) -> None:
        """Refuse values out of range, naming the option and what it takes."""
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "block_size", "users", "context"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        if self.num_workers > MAX_WORKERS:
            raise ConfigError(
                f"--tensor-parallel-size {self.tensor_parallel_size} times --pipeline-parallel-size "
                f"{self.pipeline_parallel_size} must be at most {MAX_WORKERS} workers"
            )
        if isinstance(self.max_model_len, int) and self.context is not None and self.context > self.max_model_len:
            raise ConfigError(f"--context {self.context} is longer than --max-model-len {self.max_model_len}")
        if self.num_speculative_tokens is not None and self.num_speculative_tokens < 0:
            raise ConfigError(f"num_speculative_tokens={self.num_speculative_tokens} must be at least 0")
        if not 0 < self.memory_utilization <= 1:
            raise ConfigError(f"memory_utilization={self.memory_utilization} must be above 0 and at most 1")
        if self.memory is not None and self.kv_cache_memory is not None:
            raise ConfigError("--memory and --kv-cache-memory exclude each other; the first one counts the weights too")
        for name, known in (("dtype", WEIGHT_DTYPES), ("kv_dtype", KV_DTYPES), ("state_dtype", STATE_DTYPES)):
            if getattr(self, name) not in known:
                value = getattr(self, name)
                raise ConfigError(f"{name}={value!r} is not supported; choose {', '.join(known)}")
        if self.quantization not in (None, *QUANTIZATIONS):
            choices = ", ".join(QUANTIZATIONS)
            raise ConfigError(f"quantization={self.quantization!r} is not supported; choose {choices}, or leave it out")

    @property
    def num_workers(self) -> int:
        """Return how many workers there are."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def memory_option(self) -> str:
        """Return the option that sets the memory, or those that would."""
        if self.kv_cache_memory is not None:
            return "--kv-cache-memory"
        return "--memory" if self.memory is not None else "--memory or --memory-utilization"
