"""Layers -> groups and the block size they share. Pure. Knows no bytes and no spec type.

A group is all layers whose `retention_key()` is equal: they keep the same tokens, so that one block table
serves them all, however many bytes each needs per token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from girih.errors import PlanError
from girih.kv.retention import Retention
from girih.kv.spec import KVCacheSpec

# prefix hits, and memory lost in the last block of a request, are as fine as this where the kernels allow
DEFAULT_BLOCK_TOKENS = 16


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share a block table.

    Args:
        retention: which tokens they keep.
        layers: (name, spec) in model order.
    """

    retention: Retention
    layers: tuple[tuple[str, KVCacheSpec], ...]

    def split(self, num_pieces: int) -> tuple[LayerGroup, ...]:
        """Cut the group into `num_pieces` groups with equally many layers each; it must divide their number."""
        size = len(self.layers) // num_pieces
        assert size * num_pieces == len(self.layers), (num_pieces, len(self.layers))
        starts = range(0, len(self.layers), size)
        return tuple(LayerGroup(self.retention, self.layers[start : start + size]) for start in starts)


def group_layers(specs: Mapping[str, KVCacheSpec], limit: int) -> tuple[LayerGroup, ...]:
    """Group layers by what they keep, in the order in which the model first has each kind.

    Args:
        specs: layer name -> spec, in model order.
        limit: no sequence is longer than this, in tokens; a window that reaches it is full attention.
    """
    members: dict[Retention, list[tuple[str, KVCacheSpec]]] = {}
    for name, spec in specs.items():
        members.setdefault(spec.retention_key(limit), []).append((name, spec))
    return tuple(LayerGroup(retention, tuple(layers)) for retention, layers in members.items())


def common_block_size(specs: Iterable[KVCacheSpec], block_size: int | None) -> int:
    """Return the tokens per block, the same for every group.

    Args:
        specs: all layers; each names the multiple that its attention backend takes.
        block_size: what the user asked for; None takes the smallest multiple of 16 that every backend takes.

    Raises:
        PlanError: a backend does not take the block size asked for; the message says which do.
    """
    multiple = math.lcm(1, *{spec.block_size_multiple for spec in specs})
    if block_size is None:
        return math.lcm(multiple, DEFAULT_BLOCK_TOKENS)
    if block_size < 1 or block_size % multiple:
        raise PlanError(
            f"block size {block_size} does not suit the attention backend, which takes multiples of {multiple}; "
            f"set --block-size to one, or leave it out"
        )
    return block_size
