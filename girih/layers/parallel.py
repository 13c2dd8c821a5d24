"""`Ranks`: how a worker takes part in a model that several hold together; alone, it exchanges nothing.

    tensor parallel     each rank of a stage has some heads and some columns of the MLP; what they compute is summed
    pipeline            hidden states go from each rank of a stage to the same one of the next stage
    at the end          the sampled tokens go from the rank that samples to all others

Sums are taken in float32 in the order of the ranks, so that all of them get the same bits, in every run. Nothing waits
longer than the time limit, and an error names the ranks that were waited for.
"""

from __future__ import annotations

import hashlib
import platform
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from girih.errors import ExecutorError
from girih.parallel import ParallelPlace
from girih.units import cdiv

TIMEOUT_S = 600.0
"""The longest that a worker waits for another one: more than a step of an earlier pipeline stage may take."""

MAX_SENDS = 4
"""Hidden states on their way to the next stage; with more, a stage waits before it computes another step."""


class Ranks:
    """The worker at one place, and its connections to the others.

    Args:
        place: of the worker.
        tensor_group: of torch.distributed, the ranks of its stage; None where there is one.
        timeout_s: see `connect`.
        num_local: workers on this machine.
    """

    def __init__(
        self, place: ParallelPlace, tensor_group: Any = None, timeout_s: float = TIMEOUT_S, num_local: int = 1
    ):
        self.place = place
        self.size, self.rank = place.tensor_size, place.tensor_rank
        self.num_local = num_local
        self._group = tensor_group
        self._timeout_s = timeout_s
        self._sends: deque[tuple[Any, torch.Tensor]] = deque()

    # ---- what is whose

    def share(self, num_items: int) -> range:
        """Return this rank's share of columns that are dealt out in order; shares differ by one at most."""
        return range(self.rank * num_items // self.size, (self.rank + 1) * num_items // self.size)

    def share_heads(self, num_heads: int) -> range:
        """Return this rank's heads; of fewer heads than ranks, one that several ranks have."""
        first = self.rank * num_heads // self.size
        return range(first, max(first + 1, (self.rank + 1) * num_heads // self.size))

    def share_vocabulary(self, vocab_size: int) -> range:
        """Return this rank's token ids: as many on every rank, but for the last ones where that is not whole."""
        rows = cdiv(vocab_size, self.size)
        return range(min(self.rank * rows, vocab_size), min((self.rank + 1) * rows, vocab_size))

    # ---- within a stage

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, taken in float32 in the order of the ranks, in the dtype of x."""
        if self.size == 1:
            return x
        first, *others = self._gather_all(x)
        total = first.float()
        for other in others:
            total += other
        return total.to(x.dtype)

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return what all ranks have, one behind the other along `dim`; the shapes must be equal."""
        return x if self.size == 1 else torch.cat(self._gather_all(x), dim)

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor | None:
        """Return on the first rank what `all_gather` would, on the others None."""
        if self.size == 1:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        data = None if parts is None else [_as_bytes(part) for part in parts]
        with self._waiting_for("logits", self.place.tensor_ranks):
            dist.gather(_as_bytes(x), data, dst=self.place.tensor_ranks[0], group=self._group)
        return None if parts is None else torch.cat(parts, dim)

    def _gather_all(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with self._waiting_for("a layer's share", self.place.tensor_ranks):
            dist.all_gather([_as_bytes(part) for part in parts], _as_bytes(x), group=self._group)
        return parts

    # ---- between stages

    def send(self, hidden: torch.Tensor) -> None:
        """Send hidden states to the next stage, and go on before they have arrived."""
        while len(self._sends) >= MAX_SENDS:
            with self._waiting_for("hidden states to be taken", [self.place.next_rank]):
                self._sends.popleft()[0].wait()
        hidden = hidden.contiguous()
        with self._waiting_for("hidden states to be taken", [self.place.next_rank]):
            self._sends.append((dist.isend(_as_bytes(hidden), self.place.next_rank), hidden))

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return hidden states from the stage before.

        Args:
            shape: that they have.
            dtype: that they have.
        """
        hidden = torch.empty(tuple(shape), dtype=dtype)
        with self._waiting_for("hidden states", [self.place.previous_rank]):
            dist.recv(_as_bytes(hidden), self.place.previous_rank)
        return hidden

    def start_broadcast(self, x: torch.Tensor) -> Broadcast:
        """Begin to send the tensor of the rank that samples to all workers; on the others it is overwritten."""
        with self._waiting_for("tokens", [self.place.sampling_rank]):
            return Broadcast(self, x, dist.broadcast(x, self.place.sampling_rank, async_op=True))

    def close(self) -> None:
        """Take the connections down; a second call does nothing."""
        self._sends.clear()
        if self._group is not None or self.place.world_size > 1:
            self._group = None
            if dist.is_initialized():
                dist.destroy_process_group()

    @contextmanager
    def _waiting_for(self, what: str, ranks: Sequence[int]) -> Iterator[None]:
        """Turn what goes wrong meanwhile into an error that names the ranks."""
        try:
            yield
        except RuntimeError as error:
            others = ", ".join(str(rank) for rank in ranks if rank != self.place.rank)
            raise ExecutorError(
                f"rank {self.place.rank} waited for {what} with rank {others or self.place.rank}, at most "
                f"{self._timeout_s:g} s: {str(error).splitlines()[0]}"
            ) from error


class Broadcast:
    """A tensor on its way to all workers.

    Args:
        ranks: of this worker.
        x: the tensor.
        work: of torch.distributed.
    """

    def __init__(self, ranks: Ranks, x: torch.Tensor, work: Any):
        self._ranks, self._x, self._work = ranks, x, work

    def wait(self) -> torch.Tensor:
        """Return the tensor when it is there."""
        with self._ranks._waiting_for("tokens", [self._ranks.place.sampling_rank]):
            self._work.wait()
        return self._x


ALONE = Ranks(ParallelPlace(rank=0, tensor_rank=0, tensor_size=1, stage=0, num_stages=1, layers=range(0)))
"""One worker that holds the whole of a layer."""


def connect(place: ParallelPlace, rendezvous: str | None, *, backend: str, timeout_s: float = TIMEOUT_S) -> Ranks:
    """Meet the other workers.

    Args:
        place: of this worker.
        rendezvous: where they meet, an init_method of torch.distributed such as "file:///tmp/x" or "tcp://host:port".
        backend: of torch.distributed.
        timeout_s: the longest that this, and any exchange later, waits for another worker.

    Raises:
        ExecutorError: they did not all come in time; names this rank and the others.
    """
    if place.world_size == 1:
        return Ranks(place)
    timeout = timedelta(seconds=timeout_s)
    ranks = Ranks(place, None, timeout_s)
    with ranks._waiting_for("the others to start", range(place.world_size)):
        dist.init_process_group(
            backend, init_method=rendezvous, rank=place.rank, world_size=place.world_size, timeout=timeout
        )
        groups = []
        for stage in range(place.num_stages if place.tensor_size > 1 else 0):  # all workers make all groups, in order
            members = range(stage * place.tensor_size, (stage + 1) * place.tensor_size)
            groups.append(dist.new_group(list(members), timeout=timeout))
        num_local = _count_local(place.world_size)
    return Ranks(place, groups[place.stage] if groups else None, timeout_s, num_local)


def _count_local(world_size: int) -> int:
    """Return how many workers are on this worker's machine, itself included; all workers ask together."""
    mine = torch.frombuffer(bytearray(hashlib.sha256(platform.node().encode()).digest()), dtype=torch.uint8)
    names = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(names, mine)
    return sum(torch.equal(name, mine) for name in names)


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return the same memory, of a contiguous tensor, as uint8: every backend carries that."""
    return x.view(-1).view(torch.uint8)
