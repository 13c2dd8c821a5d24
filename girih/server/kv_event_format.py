"""Events of the prefix cache as routers read them: the msgpack batches of vLLM 0.32's `KVEventBatch`.

    batch     [seconds, [event, ...], data parallel rank]
    event     {"type": "BlockStored", "block_hashes": [...], "parent_block_hash": ..., "token_ids": [...], ...}
              {"type": "BlockRemoved", "block_hashes": [...], ...}      {"type": "AllBlocksCleared"}

A block is a unit of the prefix cache, 16 tokens whatever the block sizes of the groups. Its hash is the first 64 bits
of its key as an unsigned number: that is what vLLM sends unless told otherwise, and what every router of this format
reads (llm-d, Dynamo, vLLM's own), while bytes are new to some. Units of a chain that become findable together are one
event, and so are those of a group that go together.

Each event is of one group, named by `group_idx`, as vLLM does for models with several kinds of layers. What is in the
pool has the medium "GPU" on every device: it is the name of the memory that the model computes from, and routers take
others for slower tiers.

What requests with a salt have left is not sent. A router hashes prompts without salts, so it would count those units as
everybody's; and their tokens are nobody else's business: whoever may connect reads the tokens that are sent. With API
keys every request has a salt. Girih's own router knows the engine's secret and hashes salts too: it is sent the hashes
of all units, and no tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, TypeAlias

import msgspec
import numpy as np

from girih.kv.events import KVEvents

MEDIUM = "GPU"

_KINDS = {"chunked_local": "chunked_local_attention", "state": "mamba"}  # where the names are not ours


class Event(msgspec.Struct, omit_defaults=True, tag=True):
    """What routers are told of."""


class BlockStored(Event):
    """Units of one group that became findable, each behind the one before it.

    Args:
        block_hashes: the units.
        parent_block_hash: of the unit before the first; None if there is none.
        token_ids: of all these units, one after the other.
        block_size: tokens of a unit.
        lora_id: always None, as there are no adapters.
        medium: where they are.
        lora_name: always None.
        extra_keys: always left out.
        group_idx: the group of layers.
        kv_cache_spec_kind: what the layers of the group are.
        kv_cache_spec_sliding_window: their window in tokens.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(Event):
    """Units that are gone from one group.

    Args:
        block_hashes: the units.
        medium: where they were.
        group_idx: the group of layers.
    """

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    """Everything that was stored before is gone."""


AnyEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """What one message carries.

    Args:
        ts: seconds since 1970.
        events: in order.
        data_parallel_rank: of the engine among its replicas.
    """

    ts: float
    events: list[AnyEvent]
    data_parallel_rank: int | None = None


def write_events(events: KVEvents, *, tells_tokens: bool = True) -> list[AnyEvent]:
    """Return what is to be sent of an engine's events; nothing if all of them are private.

    Args:
        events: of one engine.
        tells_tokens: False tells of private units too, but of all units by their hashes alone: for a router that hashes
            prompts and salts itself.
    """
    cleared: list[AnyEvent] = [AllBlocksCleared()] if events.is_cleared else []
    return [*cleared, *_changes(events, tells_tokens)]


def _changes(events: KVEvents, tells_tokens: bool) -> Iterable[AnyEvent]:
    order, starts = _chains(events, np.flatnonzero(~events.is_private | (not tells_tokens)))
    hashes, parents = events.keys[order, 0].tolist(), events.parents[order, 0].tolist()
    groups, depths, is_removed = events.groups[order], events.depths[order], events.is_removed[order]
    token_ids = events.token_ids[order]
    for start, end in pairwise([*starts, len(order)]):
        group = int(groups[start])
        if is_removed[start]:
            yield BlockRemoved(hashes[start:end], MEDIUM, group)
            continue
        kept = events.retentions[group].to_json()
        yield BlockStored(
            block_hashes=hashes[start:end],
            parent_block_hash=parents[start] if depths[start] > 1 else None,
            token_ids=token_ids[start:end].reshape(-1).tolist() if tells_tokens else [],
            block_size=events.unit_tokens,
            lora_id=None,
            medium=MEDIUM,
            lora_name=None,
            group_idx=group,
            kv_cache_spec_kind=_KINDS.get(kept["kind"], kept["kind"]),
            kv_cache_spec_sliding_window=kept.get("window"),
        )


def _chains(events: KVEvents, told: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Bring together what one event can say; returns the order, int [n], and where in it each event starts.

    Only events of `told`, int [n], are in it.

    Between a unit that becomes findable and one that goes nothing changes places, so that what is told stays true.
    """
    is_removed, groups = events.is_removed[told], events.groups[told]
    stretch = np.cumsum(np.diff(is_removed, prepend=is_removed[:1]))
    order = told[np.lexsort((groups, stretch))]  # a stable sort
    stretch = np.sort(stretch)
    is_removed, groups = events.is_removed[order], events.groups[order]
    follows = (stretch[1:] == stretch[:-1]) & (groups[1:] == groups[:-1])
    is_next = (events.parents[order[1:]] == events.keys[order[:-1]]).all(axis=1)
    follows &= is_removed[1:] | is_next
    return order, [0, *(np.flatnonzero(~follows) + 1).tolist()] if len(order) else []
