"""Caches -> groups, each with its block size. Pure. Knows no bytes and no spec type.

A group is all layers whose `retention_key()` is equal: they keep the same tokens, so that one block table
serves them all, however many bytes each needs per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from girih.errors import PlanError
from girih.kv.retention import Retention
from girih.kv.sharing import LayerCache

# prefix hits, and memory lost in the last block of a request, are as fine as this where the kernels allow
DEFAULT_BLOCK_TOKENS = 16


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share a block table.

    Args:
        retention: which tokens they keep.
        block_size: tokens per block.
        caches: their caches in model order.
    """

    retention: Retention
    block_size: int
    caches: tuple[LayerCache, ...]

    def split(self, num_pieces: int) -> tuple[LayerGroup, ...]:
        """Cut the group into `num_pieces` groups with equally many caches each; it must divide their number."""
        size = len(self.caches) // num_pieces
        assert size * num_pieces == len(self.caches), (num_pieces, len(self.caches))
        starts = range(0, len(self.caches), size)
        return tuple(LayerGroup(self.retention, self.block_size, self.caches[start : start + size]) for start in starts)


def group_layers(caches: Sequence[LayerCache], limit: int, block_size: int | None = None) -> tuple[LayerGroup, ...]:
    """Group layers by what they keep, in the order in which the model first has each kind.

    Args:
        caches: of one pipeline stage, in model order.
        limit: no sequence is longer than this, in tokens; a window that reaches it is full attention.
        block_size: tokens per block that the user asked for, for all groups that keep tokens; None takes in each
            group the smallest multiple of 16 that the attention backends of its layers take.

    Raises:
        PlanError: a backend does not take the block size asked for; names the layer and what it takes.
    """
    members: dict[Retention, list[LayerCache]] = {}
    for cache in caches:
        members.setdefault(cache.retention_key(limit), []).append(cache)
    return tuple(
        LayerGroup(retention, _block_size(retention, group, block_size), tuple(group))
        for retention, group in members.items()
    )


def _block_size(retention: Retention, caches: Sequence[LayerCache], block_size: int | None) -> int:
    if retention.holds_state:
        return DEFAULT_BLOCK_TOKENS  # means nothing: a page is one state
    if block_size is None:
        return math.lcm(DEFAULT_BLOCK_TOKENS, *{cache.block_size_multiple for cache in caches})
    for cache in caches:
        if block_size < 1 or block_size % cache.block_size_multiple:
            raise PlanError(
                f"block size {block_size} does not suit the attention backend of layer {cache.name!r}, which takes "
                f"multiples of {cache.block_size_multiple}; set --block-size to one, or leave it out"
            )
    return block_size
