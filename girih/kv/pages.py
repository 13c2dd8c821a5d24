"""Group + block size -> the layout of one page: each layer's offset, and the page's bytes. Pure. Knows no spec type.

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
    """One page of a group: `block_size` tokens for all its layers.

    Args:
        retention: which tokens the group keeps.
        block_size: tokens per block.
        layers: the layers with their offsets, in model order.
        page_size_bytes: bytes of a page.
        alignment_bytes: a page must start on a multiple of this.
    """

    retention: Retention
    block_size: int
    layers: tuple[KVCacheLayer, ...]
    page_size_bytes: int
    alignment_bytes: int


def page_layout(group: LayerGroup, block_size: int) -> PageLayout:
    """Lay the layers of a group side by side in one page, in model order."""
    layers, end = [], 0
    for name, spec in group.layers:
        offset = round_up(end, spec.page_alignment_bytes)
        layers.append(KVCacheLayer(name, spec, offset))
        end = offset + spec.page_size_bytes(block_size)
    alignment = math.lcm(*{spec.page_alignment_bytes for _, spec in group.layers})
    return PageLayout(group.retention, block_size, tuple(layers), round_up(end, alignment), alignment)
