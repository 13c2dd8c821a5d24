"""A layer that reads the cache of another layer and writes none: it costs no bytes.

The layer that it names may itself share; at the end of the chain stands the one with a cache. The planner follows the
chain, gives the owner the longest retention of all its readers, and places the reader where the owner is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from girih.kv.retention import Retention
from girih.kv.spec import KVCacheSpec, PageTensor
from girih.kv.specs.full_attention import FullAttentionSpec
from girih.kv.specs.sliding_window import SlidingWindowSpec


@dataclass(frozen=True)
class SharedCacheSpec(KVCacheSpec):
    """What a reader of another layer's cache would need if it had its own.

    Its `block_size_multiple` is always that of `spec`.

    Args:
        owner: name of the layer whose cache it reads.
        spec: how it reads: the tensors must be the owner's, the retention at most the owner's.
    """

    owner: str
    spec: KVCacheSpec

    kind: ClassVar[str] = "shared"

    def __post_init__(self) -> None:
        """Take the block sizes of what it reads with."""
        object.__setattr__(self, "block_size_multiple", self.spec.block_size_multiple)

    @property
    def cache_owner(self) -> str | None:
        """Return the layer whose cache this layer reads."""
        return self.owner

    def tensors(self, block_size: int) -> tuple[PageTensor, ...]:
        """Return the tensors that it reads."""
        return self.spec.tensors(block_size)

    def page_size_bytes(self, block_size: int) -> int:
        """Return 0: the bytes are the owner's."""
        return 0

    def retention_key(self, limit: int) -> Retention:
        """Return what it reads."""
        return self.spec.retention_key(limit)

    def shard(self, tensor_parallel_size: int) -> SharedCacheSpec:
        """Return what one rank reads."""
        return replace(self, spec=self.spec.shard(tensor_parallel_size))

    def with_block_size_multiple(self, multiple: int) -> SharedCacheSpec:
        """Return the same reader with an attention backend that takes other blocks."""
        return replace(self, spec=self.spec.with_block_size_multiple(multiple))


SPEC = SharedCacheSpec
EXAMPLES = (
    SharedCacheSpec("model.layers.0.self_attn", FullAttentionSpec(3, 64, "bfloat16")),
    SharedCacheSpec("model.layers.1.self_attn", SlidingWindowSpec(1, 256, "bfloat16", 512)),
)
