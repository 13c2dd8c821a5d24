"""`KVCacheConfig`: the finished plan of one worker's pool. Pure data, frozen, comparable, to and from JSON.

    pool   |slab 0        |slab 1        | ...  |slab n-1      |null page|
    slab   one group's pages at a time, e.g. 5 pages of group 0, or 1 page of group 1
    page   |layer a|layer b|layer c|pad|     = page_stride_bytes; page i starts at i * page_stride_bytes
"""

from __future__ import annotations

from dataclasses import dataclass

from girih.kv.retention import Retention
from girih.kv.spec import KVCacheSpec


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


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers that keep the same tokens: one block table, one kind of page.

    Args:
        retention: which tokens the group keeps.
        block_size: tokens per block.
        layers: the layers, in model order.
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
    def layer_names(self) -> tuple[str, ...]:
        """Return the names of the group's layers, in model order."""
        return tuple(layer.name for layer in self.layers)


@dataclass(frozen=True)
class KVCacheConfig:
    """The plan: one pool of equal slabs, and the groups that borrow them.

    Args:
        num_slabs: slabs in the pool; 0 for a model without any cache.
        slab_bytes: bytes of one slab.
        groups: the groups; a page id belongs to one group.
        max_model_len: the longest request in tokens that the plan serves (the solved value of "auto").
        num_lookahead_tokens: draft tokens a step may write beyond the confirmed ones; 0 without a draft.
    """

    num_slabs: int
    slab_bytes: int
    groups: tuple[KVCacheGroupSpec, ...]
    max_model_len: int
    num_lookahead_tokens: int = 0

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
