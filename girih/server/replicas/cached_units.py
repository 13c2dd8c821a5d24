"""What a replica has cached, as its KV events tell."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from girih.kv.config import KVCacheGroupSpec
from girih.kv.retention import Retention
from girih.server.kv_event_format import AllBlocksCleared, AnyEvent, BlockRemoved, BlockStored

MAX_UNITS = 1_000_000
"""Of one replica, some 150 bytes each; with more the oldest are forgotten, and their prompts routed by load alone."""


class CachedUnits:
    """The units of one replica, by their hashes: in which groups of layers each can be found.

    Args:
        unit_tokens: tokens of a unit.
        groups: the retention of each group of the replica's plan, and the units of its blocks; see `retained`.
        max_units: that are remembered.
    """

    def __init__(self, unit_tokens: int, groups: Sequence[tuple[Retention, int]], max_units: int = MAX_UNITS):
        self._unit_tokens = unit_tokens
        self._groups = tuple(groups)
        self._max_units = max_units
        self._listed: dict[int, int] = {}  # hash -> a bit for each group

    def __len__(self) -> int:
        """Return how many units are remembered."""
        return len(self._listed)

    def apply(self, event: AnyEvent) -> None:
        """Take note of an event."""
        match event:
            case BlockStored(block_hashes=hashes, group_idx=int(group)):
                for unit in hashes:
                    self._listed[unit] = self._listed.get(unit, 0) | 1 << group
                while len(self._listed) > self._max_units:
                    del self._listed[next(iter(self._listed))]
            case BlockRemoved(block_hashes=hashes, group_idx=int(group)):
                for unit in hashes:
                    left = self._listed.pop(unit, 0) & ~(1 << group)
                    if left:
                        self._listed[unit] = left
            case AllBlocksCleared():
                self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._listed.clear()

    def num_leading(self, hashes: Sequence[int]) -> int:
        """Return how many units of a prompt can be reused: up to the last boundary where each group has what is read.

        Args:
            hashes: of all units of the prompt, in order.
        """
        listed = np.array([self._listed.get(unit, 0) for unit in hashes], dtype=np.int64)
        ends = np.arange(1, len(listed) + 1)
        is_boundary = np.ones(len(listed), dtype=bool)
        for group, (retention, units_per_block) in enumerate(self._groups):
            is_listed = (listed >> group & 1).astype(bool)
            # a block is listed under its last unit, and those before it are found with it
            last = (ends - 1) // units_per_block * units_per_block + units_per_block - 1
            is_listed |= is_listed[np.minimum(last, len(listed) - 1)] & (last < len(listed))
            num_missing = np.concatenate(([0], np.cumsum(~is_listed)))
            first = retention.hit_first(ends * self._unit_tokens, self._unit_tokens)
            is_boundary &= num_missing[ends] == num_missing[first]
        return int(ends[is_boundary].max(initial=0))


def retained(groups: Sequence[KVCacheGroupSpec], unit_tokens: int) -> list[tuple[Retention, int]]:
    """Return what `CachedUnits` needs to know of groups."""
    return [
        (group.retention, 1 if group.retention.holds_state else group.block_size // unit_tokens) for group in groups
    ]
