"""Bring-up, written once for every executor, at the start and whenever workers are started anew:

plan from config.json -> start workers -> load model -> compare specs -> measure memory -> plan -> bind -> warm up

What then runs the plan, cache manager and scheduler, is made here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from girih import plugins
from girih.arch._int8_offer import offering_int8
from girih.config import EngineConfig
from girih.engine.checks import check_bound, check_specs
from girih.engine.expectations import expected_specs, int8_savings, most_memory
from girih.engine.report import StartupReport
from girih.executor._base import Executor
from girih.kv.config import KVCacheConfig
from girih.kv.manager import KVCacheManager
from girih.kv.plan import get_kv_cache_configs
from girih.kv.spec import KVCacheSpec
from girih.sched.scheduler import Scheduler


def bring_up(
    config: EngineConfig, model_config: Mapping[str, Any], model_limit: int, executor: Executor, report: StartupReport
) -> list[KVCacheConfig]:
    """Start the workers and give each its model and its KV cache.

    Args:
        config: the options.
        model_config: config.json.
        model_limit: the longest request in tokens that the model was made for.
        executor: its workers are not running.
        report: gets the time of every phase, and the memory found.

    Returns:
        The plan of every worker, by rank.

    Raises:
        GirihError: a worker failed, or the model does not fit; workers may be running.
    """
    with offering_int8(lambda: int8_savings(config, model_config)):
        return _bring_up(config, model_config, model_limit, executor, report)


def _bring_up(
    config: EngineConfig, model_config: Mapping[str, Any], model_limit: int, executor: Executor, report: StartupReport
) -> list[KVCacheConfig]:
    rpc = executor.collective_rpc
    with report.phase("plan from config.json"):
        expected = expected_specs(config, model_config)
        _plan(config, model_limit, expected, most_memory(config, model_config, executor.workers_are_local))
    with report.phase("start workers"):
        executor.start()
    with report.phase("load model"):
        rpc("load_model")
    with report.phase("compare cache specs"):
        specs = rpc("get_kv_cache_spec")
        check_specs(expected, specs)
    with report.phase("measure memory"):
        available_bytes = _available_memory(config, executor, report)
    with report.phase("plan KV cache"):
        configs = _plan(config, model_limit, specs, available_bytes)
    with report.phase("bind KV cache"):
        bound = rpc("initialize_from_config", args_by_rank=[(kv_config,) for kv_config in configs])
        check_bound(configs, bound)
    with report.phase("warm up"):
        rpc("compile_or_warm_up_model")
    return configs


def make_manager(config: EngineConfig, kv_cache_configs: Sequence[KVCacheConfig], secret: bytes) -> KVCacheManager:
    """Return the run time of the plans of all workers; the secret is the prefix hash's."""
    return KVCacheManager(
        kv_cache_configs,
        max_num_seqs=config.max_num_seqs,
        enable_prefix_caching=config.enable_prefix_caching,
        secret=secret,
        log_events=config.kv_events,
    )


def make_scheduler(config: EngineConfig, manager: KVCacheManager) -> Scheduler:
    """Return a scheduler with the policy that the options name."""
    policy = plugins.load("girih.sched.policies", config.scheduling_policy, what="scheduling policy")
    return Scheduler(
        manager,
        policy.order,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_micro_batches=config.max_steps_under_way if config.pipeline_parallel_size > 1 else 1,
    )


def _available_memory(config: EngineConfig, executor: Executor, report: StartupReport) -> list[int]:
    if config.kv_cache_memory_bytes is not None:
        return [config.kv_cache_memory_bytes] * config.world_size
    report.note_memory(executor.collective_rpc("determine_available_memory"))
    return [measured.available_bytes for measured in report.memory]


def _plan(
    config: EngineConfig,
    model_limit: int,
    specs: Sequence[Mapping[str, KVCacheSpec]],
    available_bytes: Sequence[int],
) -> list[KVCacheConfig]:
    return get_kv_cache_configs(
        specs,
        available_bytes,
        max_model_len=config.max_model_len,
        model_limit=model_limit,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size,
        memory_option=config.memory_option,
    )
