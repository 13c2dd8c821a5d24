"""What every cache of keys and values per token and head has in common: one page's layout, and its retention's base."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from girih.errors import PlanError
from girih.kv.retention import Retention
from girih.kv.spec import KVCacheSpec, TensorView, heads_per_rank
from girih.units import dtype_bytes, round_up

# the widest load that attention kernels use; keys, values, scales and pages start on a multiple of it
ALIGNMENT_BYTES = 16

QUANTISED_DTYPE = "int8"
SCALE_DTYPE = "float32"


@dataclass(frozen=True, kw_only=True)
class AttentionRetention(Retention):
    """Keeps tokens of the decoder's sequence.

    Args:
        hit_trim_tokens: see `Retention.hit_trim_tokens`.
    """

    hit_trim_tokens: int = 0


@dataclass(frozen=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values per token: MHA, GQA or MQA.

    One page of the layer is the keys (block_size, num_kv_heads, head_size), then the values, each dense. With dtype
    "int8" the scales of both follow, one float32 per token and head: value = int8 * scale.

    Args:
        num_kv_heads: key/value heads on this worker.
        head_size: elements of one head's key.
        dtype: dtype name of keys and values.
        v_head_size: elements of one head's value; None: head_size.
        hit_trim_tokens: tokens beyond a reused prefix that must be equal too; 1 for draft heads that read token i + 1.
    """

    num_kv_heads: int
    head_size: int
    dtype: str
    v_head_size: int | None = field(default=None, kw_only=True)
    hit_trim_tokens: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        """Refuse sizes below one and unknown dtypes, naming the field."""
        for name in ("num_kv_heads", "head_size", "v_head_size", "block_size_multiple"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{self.kind}: {name}={value} must be at least 1")
        if self.hit_trim_tokens < 0:
            raise PlanError(f"{self.kind}: hit_trim_tokens={self.hit_trim_tokens} must be at least 0")
        dtype_bytes(self.dtype)

    def page_size_bytes(self, block_size: int) -> int:
        """Return the bytes of the tensors of `block_size` tokens, each rounded up to the alignment."""
        return lay_out(self._tensors(block_size))[1]

    @property
    def page_alignment_bytes(self) -> int:
        """Return the widest load of the attention kernels, 16 bytes."""
        return ALIGNMENT_BYTES

    def view(self, block_size: int) -> tuple[TensorView, ...]:
        """Return "key" and "value", and for int8 "key_scale" and "value_scale", (block_size, num_kv_heads)."""
        return lay_out(self._tensors(block_size))[0]

    def shard(self, tensor_parallel_size: int) -> AttentionSpec:
        """Return the same with each rank's share of the heads."""
        heads = heads_per_rank(self.num_kv_heads, tensor_parallel_size, "key/value heads")
        return replace(self, num_kv_heads=heads)

    def _tensors(self, block_size: int) -> list[tuple[str, tuple[int, ...], str]]:
        heads = (block_size, self.num_kv_heads)
        tensors: list[tuple[str, tuple[int, ...], str]] = [
            ("key", (*heads, self.head_size), self.dtype),
            ("value", (*heads, self.v_head_size or self.head_size), self.dtype),
        ]
        if self.dtype == QUANTISED_DTYPE:
            tensors += [("key_scale", heads, SCALE_DTYPE), ("value_scale", heads, SCALE_DTYPE)]
        return tensors


def lay_out(tensors: list[tuple[str, tuple[int, ...], str]]) -> tuple[tuple[TensorView, ...], int]:
    """Put dense tensors one behind the other, each on the alignment.

    Args:
        tensors: (name, shape, dtype name) each.

    Returns:
        (their views, bytes of all together).
    """
    views, end = [], 0
    for name, shape, dtype in tensors:
        views.append(TensorView(name, end, shape, dtype))
        num_bytes = dtype_bytes(dtype)
        for size in shape:
            num_bytes *= size
        end = round_up(end + num_bytes, ALIGNMENT_BYTES)
    return tuple(views), end
