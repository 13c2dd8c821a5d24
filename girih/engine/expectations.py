"""What every worker will ask for, and the most memory it can have: from config.json alone, before one is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from girih import arch, plugins
from girih.config import EngineConfig
from girih.kv.spec import KVCacheSpec
from girih.units import dtype_bytes

UNKNOWN_BYTES = 1 << 50
"""More than any worker has: a plan with it refuses only what no memory would help."""


def expected_specs(options: EngineConfig, model_config: Mapping[str, Any]) -> list[dict[str, KVCacheSpec]]:
    """Say what each worker's layers will ask for; no backend was asked, so blocks are of any size.

    Args:
        options: of the engine.
        model_config: config.json.

    Returns:
        Layer name -> spec of every worker, by rank.

    Raises:
        GirihError: a number of ranks or stages, or a split, that does not work with this model; says which do.
    """
    ranks = options.tensor_parallel_size
    return [
        {name: spec.shard(ranks) for name, spec in part.kv_cache_specs.items()}
        for part in _stages(options, model_config)
        for _ in range(ranks)
    ]


def most_memory(options: EngineConfig, model_config: Mapping[str, Any], workers_are_local: bool) -> list[int]:
    """Return an upper bound of the bytes that each worker has for its KV cache, by rank.

    Args:
        options: of the engine.
        model_config: config.json.
        workers_are_local: whether the workers share this machine's memory; of other machines' nothing is known yet.
    """
    ranks = options.tensor_parallel_size
    if options.kv_cache_memory_bytes is not None:
        return [options.kv_cache_memory_bytes] * options.world_size
    if not workers_are_local:
        return [UNKNOWN_BYTES] * options.world_size
    device = plugins.load("girih.device", options.device, what="device")
    budget_bytes = int(options.memory_utilization * device.memory_facts().total_bytes)
    element_bytes = dtype_bytes(arch.resolve_dtype(options.dtype, model_config))
    return [
        budget_bytes - part.weight_bytes(element_bytes, ranks, options.quantization)
        for part in _stages(options, model_config)
        for _ in range(ranks)
    ]


def int8_savings(options: EngineConfig, model_config: Mapping[str, Any]) -> int:
    """Return the bytes that weights as int8 would leave to each worker's KV cache; 0 if they are that, or its size is
    given.

    Args:
        options: of the engine.
        model_config: config.json.
    """
    if options.quantization is not None or options.kv_cache_memory_bytes is not None:
        return 0
    ranks, element_bytes = options.tensor_parallel_size, dtype_bytes(arch.resolve_dtype(options.dtype, model_config))
    return min(
        part.weight_bytes(element_bytes, ranks) - part.weight_bytes(element_bytes, ranks, "int8")
        for part in _stages(options, model_config)
    )


def _stages(options: EngineConfig, model_config: Mapping[str, Any]) -> list[arch.ModelPart]:
    arch.check_tensor_parallel(model_config, options.tensor_parallel_size)
    dtype = arch.resolve_dtype(options.dtype, model_config)
    kv_dtype = arch.resolve_dtype(options.cache_dtype, model_config)
    return arch.stage_parts(
        model_config,
        arch.CacheDtypes(kv=kv_dtype, activation=dtype),
        num_stages=options.pipeline_parallel_size,
        pipeline_split=options.pipeline_split,
    )
