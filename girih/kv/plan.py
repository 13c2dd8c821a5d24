"""The plan: what every layer asks for + what every worker has -> one `KVCacheConfig` per worker.

Composes stages, their planners and stage classes; pure, and done before anything is allocated.

specs per worker -> stages -> the longest request -> stage classes, each with its layout -> a plan for every worker
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from girih.errors import ConfigError, PlanError
from girih.kv.config import KVCacheConfig, KVCacheGroupSpec
from girih.kv.spec import KVCacheSpec
from girih.kv.stage_classes import StageClass, form_classes
from girih.kv.stage_plan import GOOD_SCORE, StageOptions, StagePlanner
from girih.kv.stages import Stage, find_stages
from girih.units import cdiv, format_bytes

logger = logging.getLogger(__name__)

MAX_SPARE = 0.05  # share of a worker's memory; if more is left unused the user is told
MANY_SLABS = 64  # per group; with so many, what a group leaves of its last slab is no great loss


def get_kv_cache_configs(
    specs: Sequence[Mapping[str, KVCacheSpec]],
    available_memory: Sequence[int],
    *,
    max_model_len: int | str,
    model_limit: int | None = None,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 256,
    block_size: int | None = None,
    num_lookahead_tokens: int = 0,
    memory_option: str = "--kv-cache-memory or --memory-utilization",
) -> list[KVCacheConfig]:
    """Plan the KV cache of every worker.

    Args:
        specs: per worker, layer name -> spec, in model order. Workers with the same layers are the tensor-parallel
            ranks of one pipeline stage.
        available_memory: per worker, the bytes that pool and null page may take together.
        max_model_len: longest request in tokens, or "auto": the longest that the model and the memory allow.
        model_limit: the model's own length limit in tokens; needed for "auto".
        max_num_batched_tokens: tokens computed in one step; with `max_num_seqs` it says how many tokens of a request
            are in flight in a full batch, for which the layout is chosen. No memory is set aside for them.
        max_num_seqs: requests computed at once.
        block_size: tokens per block; None takes in each group the smallest multiple of 16 that every attention
            backend of its layers takes.
        num_lookahead_tokens: draft tokens that a step may write beyond the confirmed ones.
        memory_option: what the user would change for more memory; for messages.

    Returns:
        One plan per worker with the worker's own layers. Those of one stage class have equal groups, slab counts and
        pages per slab; the worker with the least memory decides.

    Raises:
        CapacityError: a request of `max_model_len` tokens does not fit on some worker; need, have, what fits, the
            options to change.
        PlanError: ranks that do not agree, a layer that reads a cache which is not there, or a block size that an
            attention backend does not take.
        ConfigError: a limit that is no number, or longer than the model's.
    """
    if len(specs) != len(available_memory) or not specs:
        raise PlanError(f"got cache specs of {len(specs)} workers and memory of {len(available_memory)}")
    limit = _length_limit(max_model_len, model_limit)
    options = StageOptions(block_size, cdiv(max_num_batched_tokens, max_num_seqs), num_lookahead_tokens, memory_option)
    planners = [StagePlanner(stage, options) for stage in find_stages(specs, available_memory)]
    longest = min(planner.longest(limit) for planner in planners)
    if longest < (1 if max_model_len == "auto" else limit):
        tightest = min(planners, key=lambda planner: planner.longest(limit))
        who = f"worker {tightest.stage.least_worker} has" if len(specs) > 1 else "there is"
        raise tightest.refusal(limit, longest, who)
    classes, max_request = _classes(planners, limit, longest if max_model_len == "auto" else None)
    return _configs(classes, max_request, available_memory)


def _classes(planners: Sequence[StagePlanner], limit: int, longest: int | None) -> tuple[list[StageClass], int]:
    """Return the stage classes and the longest request that they serve.

    Args:
        planners: the stages.
        limit: the longest request to plan for, in tokens.
        longest: for "auto", the longest of which a layout has room. The one that is chosen may fall short of it by
            1 - GOOD_SCORE: the last few tokens are not worth a worse layout.
    """
    for length in (limit,) if longest is None else (max(1, int(GOOD_SCORE * longest)), longest):
        if (classes := form_classes(planners, length)) is not None:
            return classes, min(stage_class.max_request_tokens(limit) for stage_class in classes)
    raise AssertionError(f"{longest or limit} tokens fit and have no layout")


def _configs(classes: Sequence[StageClass], max_model_len: int, available_memory: Sequence[int]) -> list[KVCacheConfig]:
    """Return the plan of every worker, by number; tell the user about waste."""
    configs: dict[int, KVCacheConfig] = {}
    first_group = 0
    for number, stage_class in enumerate(classes):
        num_slabs = stage_class.layout.num_slabs
        for member in stage_class.members:
            config = replace(
                member.choice.layout,
                num_slabs=num_slabs,
                max_model_len=max_model_len,
                stage_class=number,
                first_group=first_group,
            )
            configs.update(_by_worker(config, member.planner.stage))
        first_group += len(stage_class.layout.groups)
    _warn_of_poor_layout(classes)
    _warn_of_spare_memory(classes, configs, available_memory)
    return [configs[worker] for worker in range(len(available_memory))]


def _by_worker(config: KVCacheConfig, stage: Stage) -> Iterator[tuple[int, KVCacheConfig]]:
    """Yield (worker, the plan with the worker's own layer names)."""
    planned = stage.layer_names[0]
    renamed = {planned: config}
    for worker, names in zip(stage.workers, stage.layer_names, strict=True):
        if names not in renamed:
            name_of = dict(zip(planned, names, strict=True))
            renamed[names] = replace(config, groups=tuple(_rename(group, name_of) for group in config.groups))
        yield worker, renamed[names]


def _rename(group: KVCacheGroupSpec, name_of: Mapping[str, str]) -> KVCacheGroupSpec:
    return replace(group, layers=tuple(replace(layer, name=name_of[layer.name]) for layer in group.layers))


def _warn_of_poor_layout(classes: Sequence[StageClass]) -> None:
    """Tell the user where a full pool holds less than `GOOD_SCORE` of what it could, why, and what would help."""
    worst = min((member for stage_class in classes for member in stage_class.members), key=lambda m: m.choice.score)
    layout, score = worst.choice.layout, worst.choice.score
    if score >= GOOD_SCORE or len(layout.groups) <= 1:
        return
    if layout.num_slabs < MANY_SLABS * len(layout.groups):
        why = "each leaves part of its last one unused"
        remedy = f"more memory helps ({worst.planner.options.memory_option})"
    else:
        why, remedy = "pages of such sizes leave gaps in them", "larger blocks help (--block-size)"
    logger.warning(
        "the KV cache of worker %d holds about %.0f %% of what it could: %d groups of layers share %d slabs of %s, and "
        "%s; %s",
        worst.planner.stage.least_worker, 100 * score, len(layout.groups), layout.num_slabs,
        format_bytes(layout.slab_bytes), why, remedy,
    )  # fmt: skip


def _warn_of_spare_memory(
    classes: Sequence[StageClass], configs: Mapping[int, KVCacheConfig], available_memory: Sequence[int]
) -> None:
    """Tell the user which worker has much more memory than the one that decides for its stage class."""

    def spare_share(worker: int) -> float:
        config = configs[worker]
        return (available_memory[worker] - config.total_bytes) / available_memory[worker] if config.groups else 0.0

    worst = max(configs, key=spare_share)
    tightest = classes[configs[worst].stage_class].tightest
    if tightest.planner.stage.least_worker != worst and spare_share(worst) > MAX_SPARE:
        logger.warning(
            "worker %d uses %s of its %s for the KV cache, because worker %d has room for %d slabs only and every "
            "request needs both; the rest is of use if that one gets more memory",
            worst, format_bytes(configs[worst].total_bytes), format_bytes(available_memory[worst]),
            tightest.planner.stage.least_worker, configs[worst].num_slabs,
        )  # fmt: skip


def _length_limit(max_model_len: int | str, model_limit: int | None) -> int:
    """Return the longest request to plan for, in tokens: the one asked for, or for "auto" the model's own limit."""
    if max_model_len == "auto":
        if model_limit is None:
            raise ConfigError('max_model_len="auto" needs the model\'s own limit (model_limit)')
        return model_limit
    if isinstance(max_model_len, bool) or not isinstance(max_model_len, int) or max_model_len < 1:
        raise ConfigError(f'max_model_len={max_model_len!r} must be a whole number of at least 1, or "auto"')
    if model_limit is not None and max_model_len > model_limit:
        raise ConfigError(
            f"max_model_len={max_model_len} is longer than the model's own limit of {model_limit} tokens; "
            f"lower --max-model-len or set it to auto"
        )
    return max_model_len
