"""What every cache of keys and values per token and head has in common: its tensors, and its retention's base."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from girih.kv.retention import Retention
from girih.kv.spec import KVCacheSpec, PageTensor, check_sizes, heads_per_rank
from girih.units import dtype_bytes

QUANTISED_DTYPE = "int8"
SCALE_DTYPE = "float32"


@dataclass(frozen=True, kw_only=True)
class AttentionRetention(Retention):
    """Keeps tokens of the decoder's sequence.

    Args:
        hit_trim_tokens: see `Retention.hit_trim_tokens`.
    """

    hit_trim_tokens: int = 0

    def _with_trim(self, text: str) -> str:
        """Tell layers apart in reports that keep the same tokens but not under the same prefixes."""
        return f"{text}, {self.hit_trim_tokens} token ahead" if self.hit_trim_tokens else text


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
        names = ("num_kv_heads", "head_size", "v_head_size", "block_size_multiple")
        check_sizes(self.kind, ((name, getattr(self, name)) for name in names))
        check_sizes(self.kind, [("hit_trim_tokens", self.hit_trim_tokens)], at_least=0)
        dtype_bytes(self.dtype)

    def tensors(self, block_size: int) -> tuple[PageTensor, ...]:
        """Return "key" and "value", and for int8 "key_scale" and "value_scale", (block_size, num_kv_heads)."""
        heads = (block_size, self.num_kv_heads)
        key = PageTensor("key", (*heads, self.head_size), self.dtype)
        value = PageTensor("value", (*heads, self.v_head_size or self.head_size), self.dtype)
        if self.dtype != QUANTISED_DTYPE:
            return key, value
        return key, value, PageTensor("key_scale", heads, SCALE_DTYPE), PageTensor("value_scale", heads, SCALE_DTYPE)

    def shard(self, tensor_parallel_size: int) -> AttentionSpec:
        """Return the same with each rank's share of the heads."""
        heads = heads_per_rank(self.num_kv_heads, tensor_parallel_size, "key/value heads")
        return replace(self, num_kv_heads=heads)
