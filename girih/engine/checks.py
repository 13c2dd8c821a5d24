"""What the core checks of its workers: their specs, what they bound, and every block id before it is sent."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from girih.checkpoint.hf_config import load_config
from girih.config import EngineConfig
from girih.errors import BindingError, CheckpointError, PlanError
from girih.kv.config import KVCacheConfig
from girih.kv.spec import KVCacheSpec
from girih.messages import CacheUpdate, StepInput

logger = logging.getLogger(__name__)

SHORT_REQUEST_TOKENS = 1024
"""Below this the user is warned of the length that "auto" found."""


def check_config(directory: Path, model_config: Mapping[str, Any]) -> None:
    """Refuse to go on with another model than requests in progress began with.

    Args:
        directory: of the model.
        model_config: config.json as it was.

    Raises:
        CheckpointError: it is another one now.
    """
    if load_config(directory) != model_config:
        raise CheckpointError(f"{directory / 'config.json'} is not what it was when the engine started")


def check_specs(expected: Sequence[Mapping[str, KVCacheSpec]], specs: Sequence[Mapping[str, KVCacheSpec]]) -> None:
    """Compare what config.json says every layer caches with what the built model says.

    Only the backend, which the model was built with, knows its block sizes; that field is not compared.

    Args:
        expected: layer name -> spec, from config.json, of every worker, by rank.
        specs: the same from the workers.

    Raises:
        PlanError: they differ; names the rank, the layer and both specs.
    """
    for rank, (wanted, actual) in enumerate(zip(expected, specs, strict=True)):
        for name in (*wanted, *actual):
            want, have = wanted.get(name), actual.get(name)
            if want is not None and have is not None:
                want = want.with_block_size_multiple(have.block_size_multiple)
            if want != have:
                raise PlanError(
                    f"layer {name!r} on the worker of rank {rank} asks for {have}, but config.json says {want}"
                )


def check_bound(configs: Sequence[KVCacheConfig], bound: Sequence[Sequence[int]]) -> None:
    """Compare the planned blocks with those that the workers really bound.

    Args:
        configs: the plan of every worker, by rank.
        bound: blocks per group, by rank.

    Raises:
        BindingError: fewer are bound than planned: an id beyond them would be somebody else's memory.
    """
    for rank, (config, num_bound) in enumerate(zip(configs, bound, strict=True)):
        planned = [config.num_blocks(g) for g in range(len(config.groups))]
        if len(num_bound) != len(planned) or any(have < want for have, want in zip(num_bound, planned, strict=True)):
            raise BindingError(
                f"the worker of rank {rank} bound {list(num_bound)} blocks per group, the plan has {planned}; "
                "lower --kv-cache-memory or --memory-utilization"
            )


def check_block_ids(step: StepInput, configs: Sequence[KVCacheConfig]) -> None:
    """Refuse a step with a block id that no worker has bound.

    Args:
        step: the step.
        configs: the plan of every worker.

    Raises:
        BindingError: an id is negative or beyond the null page; names group and id.
    """
    null_ids = {
        config.first_group + group: config.null_block_id(group)
        for config in configs
        for group in range(len(config.groups))
    }
    for group, block_ids in _named_ids(step.cache):
        wrong = block_ids[(block_ids < 0) | (block_ids > null_ids[group])]
        if wrong.size:
            raise BindingError(
                f"block id {int(wrong[0])} of group {group} is not bound; ids go from 0 to {null_ids[group]}"
            )


def _named_ids(cache: CacheUpdate) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (group, ids) for all ids that a step names."""
    for copies in (*cache.moves, *cache.copies):
        yield copies.group, copies.sources
        yield copies.group, copies.destinations
    for group, table in enumerate(cache.tables):
        yield group, table.block_ids
    for group, states in cache.states.items():
        yield group, states.state_in
        yield group, states.state_out
        yield group, states.cut_pages


def warn_of_short_requests(max_request_tokens: int, model_limit: int, config: EngineConfig) -> None:
    """Tell the user where "auto" found a length so short that answers will be cut.

    Args:
        max_request_tokens: what it found.
        model_limit: in tokens.
        config: the options.
    """
    if config.max_model_len == "auto" and max_request_tokens < min(SHORT_REQUEST_TOKENS, model_limit):
        logger.warning(
            "the KV cache holds requests of up to %d tokens, prompt and output; the model's limit is %d: raise %s",
            max_request_tokens, model_limit, config.memory_option,
        )  # fmt: skip
