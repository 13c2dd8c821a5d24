"""What one layer says about its cache: `KVCacheSpec`, the base of every type in `kv/specs/`.

Frozen, hashable, picklable, without torch. The planner and the manager ask a spec; they never test its type.
A new type is a new file in `kv/specs/` with its `EXAMPLES`; the conformance tests pick it up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from girih.errors import PlanError
from girih.kv.retention import Retention


@dataclass(frozen=True)
class TensorView:
    """One tensor inside one page of one layer, as data; the worker makes the real strided view from it.

    Example, the values of a bfloat16 layer with 2 heads of 64 in blocks of 16:
    `TensorView("value", offset_bytes=4096, shape=(16, 2, 64), dtype="bfloat16")`.
    The view over the pool is (num_blocks + 1, *shape) with the group's page stride in front.

    Args:
        name: "key", "value", ... as the attention backend calls it.
        offset_bytes: start within the layer's part of the page.
        shape: elements per page, row major and dense.
        dtype: dtype name.
    """

    name: str
    offset_bytes: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec(ABC):
    """The cache need of one layer.

    Args:
        block_size_multiple: the attention backend's kernel takes blocks of any multiple of this many tokens.
    """

    block_size_multiple: int = 16

    kind: ClassVar[str]
    """The name in JSON and in reports, e.g. "full_attention"."""

    @abstractmethod
    def page_size_bytes(self, block_size: int) -> int:
        """Return the bytes of one block of `block_size` tokens for this layer."""

    @property
    @abstractmethod
    def page_alignment_bytes(self) -> int:
        """Return the alignment that this layer's part of a page needs."""

    @property
    def cache_owner(self) -> str | None:
        """Return the layer whose cache this layer reads instead of having one; None for a cache of its own."""
        return None

    @abstractmethod
    def retention_key(self, limit: int) -> Retention:
        """Return which tokens the layer keeps; layers with equal keys share a block table.

        Args:
            limit: the longest request in tokens; a window >= limit is full attention.
        """

    @abstractmethod
    def view(self, block_size: int) -> tuple[TensorView, ...]:
        """Return the tensors that make up this layer's part of one page; together they are page_size_bytes."""

    @abstractmethod
    def shard(self, tensor_parallel_size: int) -> KVCacheSpec:
        """Return what one of `tensor_parallel_size` ranks needs.

        Raises:
            PlanError: the layer's heads cannot be dealt out to so many ranks.
        """


def heads_per_rank(num_heads: int, tensor_parallel_size: int, what: str) -> int:
    """Return how many heads each rank holds: an equal share, or one that several ranks hold alike.

    Args:
        num_heads: heads of the whole layer.
        tensor_parallel_size: ranks.
        what: for the message, e.g. "key/value heads".

    Raises:
        PlanError: neither number divides the other.
    """
    if num_heads % tensor_parallel_size and tensor_parallel_size % num_heads:
        raise PlanError(
            f"{num_heads} {what} cannot be dealt out to {tensor_parallel_size} tensor-parallel ranks; choose a "
            f"--tensor-parallel-size that divides {num_heads}, or a multiple of it"
        )
    return max(1, num_heads // tensor_parallel_size)
