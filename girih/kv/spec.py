"""What one layer says about its cache: `KVCacheSpec`, the base of every type in `kv/specs/`.

Frozen, hashable, picklable, without torch. The planner and the manager ask a spec; they never test its type.
A new type is a new file in `kv/specs/` with its `EXAMPLES`; the conformance tests pick it up.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from girih.errors import PlanError
from girih.kv.retention import Retention
from girih.units import dtype_bytes, round_up

# the widest load that attention kernels use: every tensor, and every layer's part of a page, starts on a multiple of it
ALIGNMENT_BYTES = 16


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

    @property
    def end_bytes(self) -> int:
        """Return where it ends within the layer's part of the page."""
        return self.offset_bytes + math.prod(self.shape) * dtype_bytes(self.dtype)


@dataclass(frozen=True)
class PageTensor:
    """One tensor that a layer keeps in each of its pages, before it has a place there.

    Args:
        name: as the attention backend calls it.
        shape: elements per page.
        dtype: dtype name.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec(ABC):
    """The cache need of one layer. A kind says its tensors; size and layout of a page follow.

    Args:
        block_size_multiple: the attention backend's kernel takes blocks of any multiple of this many tokens.
    """

    block_size_multiple: int = 16

    kind: ClassVar[str]
    """The name in JSON and in reports, e.g. "full_attention"."""

    @abstractmethod
    def tensors(self, block_size: int) -> tuple[PageTensor, ...]:
        """Return the tensors of this layer in one page.

        Args:
            block_size: tokens of a block; a state is as large whatever that is.
        """

    @abstractmethod
    def retention_key(self, limit: int) -> Retention:
        """Return which tokens the layer keeps; layers with equal keys share a block table.

        Args:
            limit: the longest request in tokens; a window >= limit is full attention.
        """

    @abstractmethod
    def shard(self, tensor_parallel_size: int) -> KVCacheSpec:
        """Return what one of `tensor_parallel_size` ranks needs.

        Raises:
            PlanError: the layer's heads cannot be dealt out to so many ranks.
        """

    def page_size_bytes(self, block_size: int) -> int:
        """Return the bytes of one block of `block_size` tokens for this layer: its tensors, each rounded up."""
        views = self.view(block_size)
        return round_up(views[-1].end_bytes, ALIGNMENT_BYTES) if views else 0

    def view(self, block_size: int) -> tuple[TensorView, ...]:
        """Return the tensors of this layer's part of one page: dense, one behind the other, each aligned."""
        return _lay_out(self.tensors(block_size))

    @property
    def page_alignment_bytes(self) -> int:
        """Return the alignment that this layer's part of a page needs."""
        return ALIGNMENT_BYTES

    @property
    def cache_owner(self) -> str | None:
        """Return the layer whose cache this layer reads instead of having one; None for a cache of its own."""
        return None

    def with_block_size_multiple(self, multiple: int) -> KVCacheSpec:
        """Return the same need with an attention backend that takes blocks of any multiple of `multiple` tokens."""
        return replace(self, block_size_multiple=multiple)


@lru_cache(maxsize=1024)
def _lay_out(tensors: tuple[PageTensor, ...]) -> tuple[TensorView, ...]:
    views: list[TensorView] = []
    for tensor in tensors:
        start = round_up(views[-1].end_bytes, ALIGNMENT_BYTES) if views else 0
        views.append(TensorView(tensor.name, start, tensor.shape, tensor.dtype))
    return tuple(views)


def check_sizes(kind: str, sizes: Iterable[tuple[str, int | None]], *, at_least: int = 1) -> None:
    """Refuse a field of a spec that is too small.

    Args:
        kind: of the spec, for the message.
        sizes: (field, value) each; None is a field that was left out.
        at_least: the smallest value.

    Raises:
        PlanError: names kind, field and value.
    """
    for name, value in sizes:
        if value is not None and value < at_least:
            raise PlanError(f"{kind}: {name}={value} must be at least {at_least}")


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
