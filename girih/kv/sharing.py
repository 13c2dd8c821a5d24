"""Layers, of which some read another's cache -> the caches there really are. Pure. Knows no spec type.

A reader may name a reader: the chain ends at a layer with a cache of its own, on the same pipeline stage. The owner
keeps its tokens as long as the one of its readers that looks back furthest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from girih.errors import PlanError
from girih.kv.retention import NO_LIMIT, Retention
from girih.kv.spec import KVCacheSpec


@dataclass(frozen=True)
class LayerCache:
    """A layer with a cache of its own, and the layers that read it.

    Args:
        name: the owner's name.
        spec: what the owner asks for.
        readers: (name, spec) of the layers that read it, in model order.
        keeper: of owner and readers the one that decides how long tokens are kept.
    """

    name: str
    spec: KVCacheSpec
    readers: tuple[tuple[str, KVCacheSpec], ...]
    keeper: KVCacheSpec

    @property
    def block_size_multiple(self) -> int:
        """Return the smallest block in tokens that the backends of the owner and of all readers take."""
        return math.lcm(self.spec.block_size_multiple, *(spec.block_size_multiple for _, spec in self.readers))

    def retention_key(self, limit: int) -> Retention:
        """Return which tokens are kept; see `KVCacheSpec.retention_key`."""
        return self.keeper.retention_key(limit)


def find_caches(
    layers: Mapping[str, KVCacheSpec], worker_of: Mapping[str, int] | None = None
) -> tuple[LayerCache, ...]:
    """Follow every reader to the layer whose cache it reads.

    Args:
        layers: layer name -> spec of one pipeline stage, in model order.
        worker_of: layer name -> worker of the layers of all stages, for messages.

    Returns:
        The caches in model order.

    Raises:
        PlanError: a chain without an end or with an owner that is nowhere or on another stage; a reader whose tensors
            are not the owner's, or that needs tokens which nobody of them keeps together. Names layers and remedy.
    """
    readers: dict[str, list[tuple[str, KVCacheSpec]]] = {}
    owner_of: dict[str, str] = {}
    for name, spec in layers.items():
        if spec.cache_owner is not None:
            *chain, owner = _follow(name, layers, owner_of, worker_of or {})
            owner_of.update(dict.fromkeys(chain, owner))
            _check_tensors(name, spec, owner, layers[owner])
            readers.setdefault(owner, []).append((name, spec))
    return tuple(
        LayerCache(name, spec, tuple(readers.get(name, ())), _keeper(name, spec, readers.get(name, ())))
        for name, spec in layers.items()
        if spec.cache_owner is None
    )


def _follow(
    reader: str, layers: Mapping[str, KVCacheSpec], owner_of: Mapping[str, str], worker_of: Mapping[str, int]
) -> list[str]:
    """Return the chain from `reader` to the layer with a cache; `owner_of` has the ends that are known already."""
    chain = [reader]
    while (owner := layers[chain[-1]].cache_owner) is not None:
        owner = owner_of.get(owner, owner)
        if owner in chain:
            raise PlanError(
                f"layers read each other's caches in a circle: {' -> '.join([*chain, owner])}; give one of them a "
                f"cache of its own"
            )
        if owner in worker_of and owner not in layers:
            raise PlanError(
                f"layer {chain[-1]!r} on worker {worker_of[reader]} reads the cache of layer {owner!r}, which is on "
                f"worker {worker_of[owner]}, another pipeline stage; choose a --pipeline-parallel-size that keeps "
                f"both on one stage"
            )
        if owner not in layers:
            raise PlanError(
                f"layer {chain[-1]!r} reads the cache of layer {owner!r}, which does not exist; name one of the "
                f"layers with a cache, or give it one of its own"
            )
        chain.append(owner)
    return chain


def _check_tensors(reader: str, spec: KVCacheSpec, owner: str, owner_spec: KVCacheSpec) -> None:
    block_size = math.lcm(spec.block_size_multiple, owner_spec.block_size_multiple)
    reads, has = spec.view(block_size), owner_spec.view(block_size)
    if reads != has:
        raise PlanError(
            f"layer {reader!r} reads the cache of layer {owner!r} as other tensors than it has: {reads} and {has}; "
            f"give both the same heads, sizes and dtype, or {reader!r} a cache of its own"
        )


def _keeper(owner: str, spec: KVCacheSpec, readers: Sequence[tuple[str, KVCacheSpec]]) -> KVCacheSpec:
    """Return the spec whose retention covers that of all others; one does without a limit, so it does under any."""
    if not readers:
        return spec
    members = [(owner, spec), *readers]
    kept = [member.retention_key(NO_LIMIT) for _, member in members]
    for (_, member), longest in zip(members, kept, strict=True):
        if all(longest.covers(other) for other in kept):
            return member
    needs = ", ".join(f"{name!r} {retention.describe()}" for (name, _), retention in zip(members, kept, strict=True))
    raise PlanError(
        f"no layer keeps what all readers of the cache of layer {owner!r} need: {needs}; give those that differ a "
        f"cache of their own"
    )
