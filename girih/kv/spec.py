"""What one layer says about its cache: `KVCacheSpec`, the base of every type in `kv/specs/`.

Frozen, hashable, picklable, without torch. The planner and the manager ask a spec; they never test its type.
A new type is a new file in `kv/specs/` with its `EXAMPLES`; the conformance tests pick it up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

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

    @abstractmethod
    def retention_key(self, limit: int) -> Retention:
        """Return which tokens the layer keeps; layers with equal keys share a block table.

        Args:
            limit: the longest request in tokens; a window >= limit is full attention.
        """

    @abstractmethod
    def view(self, block_size: int) -> tuple[TensorView, ...]:
        """Return the tensors that make up this layer's part of one page; together they are page_size_bytes."""
