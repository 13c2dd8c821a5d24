"""Group -> the layout of one page: each layer's offset, and the page's bytes. Pure. Knows no spec type.

page   |layer a|layer b|..|layer c|     each part starts on its own alignment; the page ends on the group's
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from girih.kv.config import KVCacheLayer
from girih.kv.grouping import LayerGroup
from girih.kv.retention import Retention
from girih.units import round_up


@dataclass(frozen=True)
class PageLayout:
    """One page of a group: a block of tokens, or a state, for all its layers.

    Args:
        retention: which tokens the group keeps.
        block_size: tokens per block.
        layers: the layers with their offsets: caches in model order, each followed by the layers that read it.
        page_size_bytes: bytes of a page.
        alignment_bytes: a page must start on a multiple of this.
    """

    retention: Retention
    block_size: int
    layers: tuple[KVCacheLayer, ...]
    page_size_bytes: int
    alignment_bytes: int

    @property
    def key(self) -> tuple[Retention, int]:
        """Return what a group has on every stage that has it: which tokens it keeps, and in what blocks."""
        return self.retention, self.block_size


def page_layout(group: LayerGroup) -> PageLayout:
    """Lay the caches of a group side by side in one page, in model order; who reads a cache is where it is."""
    layers, end, alignment = [], 0, 1
    for cache in group.caches:
        offset = round_up(end, cache.spec.page_alignment_bytes)
        layers.append(KVCacheLayer(cache.name, cache.spec, offset))
        layers += [KVCacheLayer(name, spec, offset) for name, spec in cache.readers]
        end = offset + cache.spec.page_size_bytes(group.block_size)
        alignment = math.lcm(alignment, cache.spec.page_alignment_bytes)
    return PageLayout(group.retention, group.block_size, tuple(layers), round_up(end, alignment), alignment)
