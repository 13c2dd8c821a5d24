"""The request router of Ray Serve that knows which replica has how much of a prompt cached."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import zmq.asyncio
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from girih.kv.hashing import TokenHasher
from girih.server.replicas.follower import Follower, Source
from girih.server.replicas.messages import Forwarded, Hint
from girih.server.replicas.placement import Placement

SOURCE = "kv_events"
"""Where in a replica's routing stats its `Source` is."""


@dataclass
class _Followed:
    """A replica whose events are followed.

    Args:
        source: what it said of them.
        hasher: makes its hashes.
        follower: knows what it has.
        task: of the follower.
    """

    source: Source
    hasher: TokenHasher
    follower: Follower
    task: asyncio.Task[None]

    def num_cached(self, hint: Hint) -> int:
        """Return the tokens of a prompt that it has cached, as far as is known."""
        keys = self.hasher.chain(self.hasher.root(hint.salt), hint.token_ids)
        return self.follower.units.num_leading(keys[:, 0].tolist()) * self.hasher.unit


class PrefixRouter(RequestRouter):
    """Sends each request by `Placement`'s rule. A replica whose events are not known (yet) has nothing cached to it.

    Serve makes one in each process that calls the replicas, that is in each ingress, and calls it from one event loop.
    """

    def initialize_state(self, **_kwargs: Any) -> None:
        """Begin with nothing."""
        self._placement: Placement[ReplicaID] = Placement()
        self._followed: dict[ReplicaID, _Followed] = {}
        self._context = zmq.asyncio.Context()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take in which replicas there are: follow new ones, forget those that are gone."""
        super().update_replicas(replicas)
        running = {replica.replica_id for replica in replicas}
        for replica_id in self._followed.keys() - running:
            self._forget(replica_id)
        for replica in replicas:
            self._follow(replica.replica_id, replica.routing_stats.get(SOURCE))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica that has died."""
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas for a request, best first, each a rank of its own."""
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        hint = _hint(pending_request.args) if pending_request is not None else None
        ranked = self._placement.rank({replica_id: self._num_cached(replica_id, hint) for replica_id in by_id})
        if pending_request is not None and ranked:
            pending_request.routing_context.should_backoff = True  # before it is asked again
            request_id = pending_request.metadata.internal_request_id
            self._placement.begin(request_id, ranked[0], 1 if hint is None else hint.num_sequences)
            pending_request.future.add_done_callback(
                lambda future: self._placement.end(request_id) if future.cancelled() else None
            )
        return [[by_id[replica_id]] for replica_id in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note where a request has really gone: not to the best one if that did not answer."""
        self._placement.move(pending_request.metadata.internal_request_id, replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note that a request has ended."""
        self._placement.end(internal_request_id)

    def _num_cached(self, replica_id: ReplicaID, hint: Hint | None) -> int:
        followed = self._followed.get(replica_id)
        return 0 if followed is None or hint is None else followed.num_cached(hint)

    def _follow(self, replica_id: ReplicaID, stats: dict[str, Any] | None) -> None:
        source = None if stats is None else Source(**stats)
        followed = self._followed.get(replica_id)
        if source is None or (followed is not None and followed.source == source):
            return
        self._leave(replica_id)
        follower = Follower(self._context, source)
        hasher = TokenHasher(source.unit_tokens, bytes.fromhex(source.secret))
        task = asyncio.get_running_loop().create_task(follower.run())
        self._followed[replica_id] = _Followed(source, hasher, follower, task)

    def _forget(self, replica_id: ReplicaID) -> None:
        self._placement.forget(replica_id)
        self._leave(replica_id)

    def _leave(self, replica_id: ReplicaID) -> None:
        followed = self._followed.pop(replica_id, None)
        if followed is not None:
            followed.task.cancel()


def _hint(args: Sequence[Any]) -> Hint | None:
    return args[0].hint if args and isinstance(args[0], Forwarded) else None
