"""What every cache of keys and values per token and head has in common: one page's layout."""

from __future__ import annotations

from dataclasses import dataclass

from girih.errors import PlanError
from girih.kv.spec import KVCacheSpec, TensorView
from girih.units import dtype_bytes, round_up

# the widest load that attention kernels use; keys, values and pages start on a multiple of it
ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values per token: MHA, GQA or MQA.

    One page of the layer is the keys, then the values, each (block_size, num_kv_heads, head_size) and dense.

    Args:
        num_kv_heads: key/value heads on this worker.
        head_size: elements of one head.
        dtype: dtype name of keys and values.
    """

    num_kv_heads: int
    head_size: int
    dtype: str

    def __post_init__(self) -> None:
        """Refuse sizes below one and unknown dtypes, naming the field."""
        for name in ("num_kv_heads", "head_size", "block_size_multiple"):
            if getattr(self, name) < 1:
                raise PlanError(f"{self.kind}: {name}={getattr(self, name)} must be at least 1")
        dtype_bytes(self.dtype)

    def page_size_bytes(self, block_size: int) -> int:
        """Return the bytes of keys and values of `block_size` tokens, each rounded up to the alignment."""
        return 2 * self._half_bytes(block_size)

    @property
    def page_alignment_bytes(self) -> int:
        """Return the widest load of the attention kernels, 16 bytes."""
        return ALIGNMENT_BYTES

    def view(self, block_size: int) -> tuple[TensorView, ...]:
        """Return "key" and "value", each (block_size, num_kv_heads, head_size)."""
        shape = (block_size, self.num_kv_heads, self.head_size)
        return (
            TensorView("key", 0, shape, self.dtype),
            TensorView("value", self._half_bytes(block_size), shape, self.dtype),
        )

    def _half_bytes(self, block_size: int) -> int:
        return round_up(block_size * self.num_kv_heads * self.head_size * dtype_bytes(self.dtype), ALIGNMENT_BYTES)
