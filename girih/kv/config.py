"""`KVCacheConfig`: the finished plan of one worker's pool. Pure data, frozen, comparable, to and from JSON.

pool   |slab 0        |slab 1        | ...  |slab n-1      |null page|
slab   one group's pages at a time, e.g. 5 pages of group 0, or 1 page of group 1
page   |layer a|layer b|layer c|pad|     = page_stride_bytes; page i starts at i * page_stride_bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from girih.errors import PlanError
from girih.kv import specs
from girih.kv.retention import Retention
from girih.kv.spec import KVCacheSpec
from girih.units import format_bytes


@dataclass(frozen=True)
class KVCacheLayer:
    """One layer's place in every page of its group.

    Args:
        name: the layer's name, e.g. "model.layers.3.self_attn".
        spec: what the layer asked for.
        offset_bytes: where its part starts within the page.
    """

    name: str
    spec: KVCacheSpec
    offset_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {"name": self.name, "spec": specs.spec_to_json(self.spec), "offset_bytes": self.offset_bytes}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> KVCacheLayer:
        """Make the layer that `to_json` wrote."""
        return cls(**{**data, "spec": specs.spec_from_json(data["spec"])})


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers that keep the same tokens: one block table, one kind of page.

    Args:
        retention: which tokens the group keeps.
        block_size: tokens per block.
        layers: the layers, in model order; a layer that reads another's cache follows that one, at the same offset.
        page_size_bytes: bytes of a page that hold cache (the sum over the layers, with alignment).
        page_stride_bytes: distance between two pages, slab_bytes / pages_per_slab.
        pages_per_slab: whole pages in one slab.
    """

    retention: Retention
    block_size: int
    layers: tuple[KVCacheLayer, ...]
    page_size_bytes: int
    page_stride_bytes: int
    pages_per_slab: int

    @property
    def key(self) -> tuple[Retention, int]:
        """Return what the group has on every worker: which tokens it keeps, and in what blocks."""
        return self.retention, self.block_size

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Return the names of the group's layers, in model order."""
        return tuple(layer.name for layer in self.layers)

    @property
    def caches(self) -> tuple[KVCacheLayer, ...]:
        """Return the layers that have a cache of their own: the parts of a page, by offset."""
        return tuple(layer for layer in self.layers if layer.spec.cache_owner is None)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        layers = [layer.to_json() for layer in self.layers]
        return {**vars(self), "retention": self.retention.to_json(), "layers": layers}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> KVCacheGroupSpec:
        """Make the group that `to_json` wrote."""
        retention = specs.retention_from_json(data["retention"])
        return cls(
            **{**data, "retention": retention, "layers": tuple(KVCacheLayer.from_json(item) for item in data["layers"])}
        )


@dataclass(frozen=True)
class KVCacheConfig:
    """The plan: one pool of equal slabs, and the groups that borrow them.

    Args:
        num_slabs: slabs in the pool; 0 for a model without any cache.
        slab_bytes: bytes of one slab.
        groups: the groups; a page id belongs to one group.
        max_model_len: the longest request in tokens that the plan serves (the solved value of "auto").
        num_lookahead_tokens: draft tokens a step may write beyond the confirmed ones; 0 without a draft.
        stage_class: workers with equal numbers have pools that are used alike: the same page ids, slab for slab.
        first_group: number of the first of these groups among the groups of all stage classes; the engine core and
            the block table updates count that way.
    """

    num_slabs: int
    slab_bytes: int
    groups: tuple[KVCacheGroupSpec, ...]
    max_model_len: int
    num_lookahead_tokens: int = 0
    stage_class: int = 0
    first_group: int = 0

    @property
    def pool_bytes(self) -> int:
        """Return the bytes of all slabs, without the null page."""
        return self.num_slabs * self.slab_bytes

    @property
    def null_page_bytes(self) -> int:
        """Return the bytes of the scratch page behind the pool: the largest stride."""
        return max((group.page_stride_bytes for group in self.groups), default=0)

    @property
    def total_bytes(self) -> int:
        """Return what the worker allocates: pool and null page."""
        return self.pool_bytes + self.null_page_bytes

    def num_blocks(self, group: int) -> int:
        """Return the pages that group `group` would have if it borrowed every slab."""
        return self.num_slabs * self.groups[group].pages_per_slab

    def null_block_id(self, group: int) -> int:
        """Return the id of the null page in group `group`: the one past its last page."""
        return self.num_blocks(group)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values; the inverse is `from_json`."""
        return {**vars(self), "groups": [group.to_json() for group in self.groups]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> KVCacheConfig:
        """Make the plan that `to_json` wrote.

        Raises:
            PlanError: a field is missing or unknown.
        """
        try:
            return cls(**{**data, "groups": tuple(KVCacheGroupSpec.from_json(group) for group in data["groups"])})
        except (KeyError, TypeError) as error:
            raise PlanError(f"this JSON is not a KV cache plan: {error}") from error

    def describe(self) -> str:
        """Return the plan in a few lines: the pool, then one line per group."""
        if not self.groups:
            return f"no KV cache; requests up to {self.max_model_len} tokens"
        lines = [
            f"{format_bytes(self.pool_bytes)} pool = {self.num_slabs} slabs of {format_bytes(self.slab_bytes)}; "
            f"requests up to {self.max_model_len} tokens"
        ]
        for index, group in enumerate(self.groups):
            count = len(group.caches)
            layers = f"{count} layer{'s' if count != 1 else ''}"
            if len(group.layers) > count:
                layers += f" and {len(group.layers) - count} that read their caches"
            lines.append(
                f"group {self.first_group + index}: {group.retention.describe()}, {layers}, "
                f"blocks of {group.block_size} tokens, pages of {format_bytes(group.page_size_bytes)}, "
                f"{group.pages_per_slab} per slab, {self.num_blocks(index)} in all"
            )
        return "\n".join(lines)


def one_per_class(configs: Sequence[KVCacheConfig]) -> tuple[KVCacheConfig, ...]:
    """Return a plan for each stage class, by its number: the first worker's.

    Args:
        configs: one plan per worker. Within a class all but layers and bytes is equal.

    Raises:
        PlanError: two plans of a class that cannot be used alike; names the class.
    """
    first: dict[int, KVCacheConfig] = {}
    for config in configs:
        other = first.setdefault(config.stage_class, config)
        if config is not other and _shape(config) != _shape(other):
            raise PlanError(
                f"plans of stage class {config.stage_class} have other groups, slabs or lengths; make all plans with "
                f"one call of get_kv_cache_configs"
            )
    return tuple(first[number] for number in sorted(first))


def _shape(config: KVCacheConfig) -> tuple[Any, ...]:
    groups = tuple((group.key, group.pages_per_slab) for group in config.groups)
    return config.num_slabs, groups, config.max_model_len, config.num_lookahead_tokens, config.first_group
