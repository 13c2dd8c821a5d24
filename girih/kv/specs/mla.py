"""Multi-head latent attention (MLA): one latent vector per token for all heads, and what else is kept per token.

Its retention is that of the attention it stands for: full, or a window. An indexer that chooses tokens (DeepSeek V3.2)
keeps one vector per token as well and has a spec of its own of this kind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from girih.kv.retention import Retention
from girih.kv.spec import KVCacheSpec, PageTensor, check_sizes
from girih.kv.specs._attention import QUANTISED_DTYPE, SCALE_DTYPE
from girih.kv.specs.full_attention import FullAttentionRetention
from girih.kv.specs.sliding_window import window_retention
from girih.units import dtype_bytes


@dataclass(frozen=True)
class MLAAttentionSpec(KVCacheSpec):
    """One vector per token.

    One page of the layer is "latent" (block_size, latent_size). With dtype "int8" a float32 scale per token follows.

    Args:
        latent_size: elements of the vector, e.g. kv_lora_rank + qk_rope_head_dim.
        dtype: dtype name.
        sliding_window: tokens a query sees, itself included; None: all.
        hit_trim_tokens: tokens beyond a reused prefix that must be equal too; 1 for draft heads that read token i + 1.
    """

    latent_size: int
    dtype: str
    sliding_window: int | None = field(default=None, kw_only=True)
    hit_trim_tokens: int = field(default=0, kw_only=True)

    kind: ClassVar[str] = "mla"

    def __post_init__(self) -> None:
        """Refuse sizes below one and unknown dtypes, naming the field."""
        names = ("latent_size", "sliding_window", "block_size_multiple")
        check_sizes(self.kind, ((name, getattr(self, name)) for name in names))
        check_sizes(self.kind, [("hit_trim_tokens", self.hit_trim_tokens)], at_least=0)
        dtype_bytes(self.dtype)

    def tensors(self, block_size: int) -> tuple[PageTensor, ...]:
        """Return "latent", (block_size, latent_size), and for int8 "latent_scale", (block_size,)."""
        latent = PageTensor("latent", (block_size, self.latent_size), self.dtype)
        if self.dtype != QUANTISED_DTYPE:
            return (latent,)
        return latent, PageTensor("latent_scale", (block_size,), SCALE_DTYPE)

    def retention_key(self, limit: int) -> Retention:
        """Return full attention, or the window."""
        if self.sliding_window is None:
            return FullAttentionRetention(hit_trim_tokens=self.hit_trim_tokens)
        return window_retention(self.sliding_window, limit, self.hit_trim_tokens)

    def shard(self, tensor_parallel_size: int) -> MLAAttentionSpec:
        """Return the same: all heads read the one vector, so that every rank holds it."""
        return self


SPEC = MLAAttentionSpec
EXAMPLES = (
    MLAAttentionSpec(576, "bfloat16"),
    MLAAttentionSpec(132, "uint8"),
    MLAAttentionSpec(40, "int8", block_size_multiple=64),
    MLAAttentionSpec(24, "float32", sliding_window=33),
)
