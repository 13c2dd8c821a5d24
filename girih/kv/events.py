"""`KVEvents`: which prefix units became findable, and which are gone. For routers that send a prompt where it hits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from girih.kv.retention import Retention


@dataclass(frozen=True)
class KVEvents:
    """What has happened to the prefix cache since somebody asked last, in order. Each event is of a unit and a group.

    A unit is findable in a group while the group has a page for it. What of a prompt can be reused is up to all groups
    together: up to the last boundary, not behind the last unit that any group has, where each group has what the next
    token reads (`Retention.hit_first`): all units for full attention, the last ones for a window, the one at the
    boundary for recurrent layers. A block of several units is listed under its last one, and the others can be found
    with it.

    Args:
        is_cleared: before all others: everything that was known is gone.
        unit_tokens: tokens of a unit.
        retentions: what each group keeps; other ones after workers with another plan were started.
        is_removed: bool [n]; the unit is gone, else it has become findable.
        groups: int32 [n]; the group.
        keys: uint64 [n, 2]; of the unit: it stands for all tokens up to the unit's end.
        parents: uint64 [n, 2]; the key of the unit before it, of the salt for a first unit; 0 for one that is gone.
        depths: int32 [n]; units up to this one, itself counted; 0 for one that is gone.
        token_ids: int32 [n, unit_tokens]; the unit's tokens; 0 for one that is gone or private.
        is_private: bool [n]; the unit is of requests with a salt: nobody else may learn what is in it.
    """

    is_cleared: bool
    unit_tokens: int
    retentions: tuple[Retention, ...]
    is_removed: np.ndarray
    groups: np.ndarray
    keys: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    token_ids: np.ndarray
    is_private: np.ndarray

    def __bool__(self) -> bool:
        """Tell whether anything has happened."""
        return self.is_cleared or len(self.groups) > 0
