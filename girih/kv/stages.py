"""What every worker asks for -> the pipeline stages there are. Pure. Knows no spec type.

Workers with the same layers are the tensor-parallel ranks of one stage and must agree on every layer; pipeline stages
have no layer in common. Stages whose layers need the same, in the same order, are planned as one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from girih.errors import PlanError
from girih.kv.sharing import LayerCache, find_caches
from girih.kv.spec import KVCacheSpec


@dataclass(frozen=True)
class Stage:
    """Workers that are planned as one: the ranks of a stage, and of every other stage that asks for the same.

    Args:
        caches: of the first of its workers, in model order.
        workers: their numbers, ascending.
        layer_names: the layers of each of its workers, in an order that all of them share.
        memory_bytes: the least that one of the workers has for pool and null page.
        least_worker: which one that is.
    """

    caches: tuple[LayerCache, ...]
    workers: tuple[int, ...]
    layer_names: tuple[tuple[str, ...], ...]
    memory_bytes: int
    least_worker: int


def find_stages(specs: Sequence[Mapping[str, KVCacheSpec]], available_memory: Sequence[int]) -> list[Stage]:
    """Find the stages among the workers.

    Args:
        specs: per worker, layer name -> spec, in model order.
        available_memory: per worker, bytes.

    Returns:
        The stages, in the order of their first workers.

    Raises:
        PlanError: ranks of one stage that differ, workers that have some layers in common and others not, or a layer
            that reads a cache which its stage does not have. Names layers and workers.
    """
    first_with = _first_with_same_layers(specs)
    worker_of = {name: worker for worker in first_with.values() for name in specs[worker]}
    alike: dict[tuple[KVCacheSpec, ...], list[int]] = {}
    needs = {worker: tuple(specs[worker].values()) for worker in first_with.values()}
    for worker, first in first_with.items():
        alike.setdefault(needs[first], []).append(worker)
    names = {worker: tuple(specs[worker]) for worker in needs}
    stages = []
    for workers in alike.values():
        least = min(workers, key=lambda worker: available_memory[worker])
        stages.append(
            Stage(
                caches=find_caches(specs[workers[0]], worker_of),
                workers=tuple(workers),
                layer_names=tuple(names[first_with[worker]] for worker in workers),
                memory_bytes=available_memory[least],
                least_worker=least,
            )
        )
    return stages


def _first_with_same_layers(specs: Sequence[Mapping[str, KVCacheSpec]]) -> dict[int, int]:
    """Return for each worker the first one that has the same layers."""
    first_with: dict[int, int] = {}
    by_names: dict[frozenset[str], int] = {}
    worker_of: dict[str, int] = {}
    for worker, layers in enumerate(specs):
        names = frozenset(layers)
        first = first_with[worker] = by_names.setdefault(names, worker)
        if first != worker:
            _check_equal(worker, layers, first, specs[first])
            continue
        for name in layers:
            if (other := worker_of.setdefault(name, worker)) != worker:
                raise _overlap(worker, layers, other, specs[other], name)
    return first_with


def _check_equal(
    worker: int, layers: Mapping[str, KVCacheSpec], first: int, first_layers: Mapping[str, KVCacheSpec]
) -> None:
    if layers == first_layers:  # the quick way through thousands of equal ones
        return
    name = next(name for name, spec in layers.items() if first_layers[name] != spec)
    raise PlanError(
        f"worker {worker} and worker {first} differ in layer {name!r}: {layers[name]} and {first_layers[name]}; "
        f"tensor-parallel ranks hold equal shares of the same layers"
    )


def _overlap(
    worker: int, layers: Mapping[str, KVCacheSpec], other: int, other_layers: Mapping[str, KVCacheSpec], common: str
) -> PlanError:
    have = (worker, other) if layers.keys() - other_layers.keys() else (other, worker)
    alone = next(name for name in (*layers, *other_layers) if (name in layers) != (name in other_layers))
    return PlanError(
        f"worker {other} and worker {worker} both have layer {common!r}, but of them only worker {have[0]} has layer "
        f"{alone!r}; tensor-parallel ranks have all layers in common, pipeline stages none"
    )
