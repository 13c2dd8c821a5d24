"""What the core checks of its workers: their specs, what they bound, and every block id before it is sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from girih.errors import BindingError, PlanError
from girih.kv.config import KVCacheConfig
from girih.kv.spec import KVCacheSpec
from girih.messages import StepInput


def check_specs(expected: Mapping[str, KVCacheSpec], specs: Sequence[Mapping[str, KVCacheSpec]]) -> None:
    """Compare what config.json says every layer caches with what the built model says.

    Only the backend, which the model was built with, knows its block sizes; that field is not compared.

    Args:
        expected: layer name -> spec, from config.json.
        specs: the same from every worker, by rank.

    Raises:
        PlanError: they differ; names the rank, the layer and both specs.
    """
    for rank, actual in enumerate(specs):
        for name in (*expected, *actual):
            want, have = expected.get(name), actual.get(name)
            if want is not None and have is not None:
                want = dataclasses.replace(want, block_size_multiple=have.block_size_multiple)
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


def check_block_ids(step: StepInput, config: KVCacheConfig) -> None:
    """Refuse a step with a block id that no worker has bound.

    Raises:
        BindingError: an id is negative or beyond the null page; names group and id.
    """
    for group, update in enumerate(step.cache.tables):
        null_id = config.null_block_id(group)
        wrong = update.block_ids[(update.block_ids < 0) | (update.block_ids > null_id)]
        if wrong.size:
            raise BindingError(f"block id {int(wrong[0])} of group {group} is not bound; ids go from 0 to {null_id}")
