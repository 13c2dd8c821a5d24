"""The rule by which requests go to replicas, and the record of where they are in progress."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

Replica = TypeVar("Replica", bound=Hashable)

TOKENS_PER_SEQUENCE = 256
"""What a sequence in progress weighs: about the tokens of an answer, which cost as much as a prompt's or more."""


class Placement(Generic[Replica]):
    """Ranks replicas by what a request would cost there:

        tokens of its prompt that are not cached there + 256 * sequences that are in progress there

    So a prompt follows its prefix until the replica that has it is busier than others by more than the prefix saves;
    then another one computes it too, and has it from then on. Among equals the one that was chosen longest ago is next.
    """

    def __init__(self) -> None:
        self._in_progress: dict[str, tuple[Replica, int]] = {}
        self._num_sequences: Counter[Replica] = Counter()
        self._chosen_at: dict[Replica, int] = {}
        self._clock = itertools.count(1)

    def rank(self, num_cached: Mapping[Replica, int]) -> list[Replica]:
        """Return replicas, best first.

        Args:
            num_cached: for each one, tokens of the request's prompt that it has cached.
        """

        def cost(replica: Replica) -> tuple[int, int]:
            tokens = TOKENS_PER_SEQUENCE * self._num_sequences[replica] - num_cached[replica]
            return tokens, self._chosen_at.get(replica, 0)

        return sorted(num_cached, key=cost)

    def begin(self, request_id: str, replica: Replica, num_sequences: int) -> None:
        """Note that a request is to go to a replica; if it was to go to another one before, it does no more."""
        self.end(request_id)
        self._in_progress[request_id] = replica, num_sequences
        self._num_sequences[replica] += num_sequences
        self._chosen_at[replica] = next(self._clock)

    def move(self, request_id: str, replica: Replica) -> None:
        """Note that a request has gone to another replica than it was to; one that has ended already is no error."""
        where, num_sequences = self._in_progress.get(request_id, (replica, 0))
        if where != replica:
            self.begin(request_id, replica, num_sequences)

    def end(self, request_id: str) -> None:
        """Note that a request has ended; one that is not known is no error."""
        replica, num_sequences = self._in_progress.pop(request_id, (None, 0))
        if replica is not None:
            self._num_sequences[replica] -= num_sequences

    def forget(self, replica: Replica) -> None:
        """Forget a replica that is gone."""
        for request_id in [known for known, (where, _) in self._in_progress.items() if where == replica]:
            self.end(request_id)
        self._num_sequences.pop(replica, None)
        self._chosen_at.pop(replica, None)
