"""Full attention: every token of the sequence is kept until the request ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from girih.kv.retention import Count, Retention
from girih.kv.specs._attention import AttentionRetention, AttentionSpec
from girih.units import cdiv


@dataclass(frozen=True)
class FullAttentionRetention(AttentionRetention):
    """Keeps all tokens."""

    kind: ClassVar[str] = "full_attention"

    def live_range(
        self, num_computed_tokens: Count, num_new_tokens: Count | int, block_size: int, num_lookahead_tokens: int = 0
    ) -> tuple[Count, Count]:
        """Return (0, blocks of all tokens so far, the new ones and the lookahead)."""
        end = num_computed_tokens + num_new_tokens + num_lookahead_tokens
        return num_computed_tokens * 0, -(-end // block_size)

    def blocks_held(self, num_tokens: int, block_size: int, num_lookahead_tokens: int = 0) -> int:
        """Return the blocks of all tokens and the lookahead."""
        return cdiv(num_tokens + num_lookahead_tokens, block_size)

    def peak_blocks(self, num_tokens: int, block_size: int, num_lookahead_tokens: int = 0) -> int:
        """Return the same as `blocks_held`: what only grows peaks at its end."""
        return cdiv(num_tokens + num_lookahead_tokens, block_size)

    def covers(self, other: Retention) -> bool:
        """Tell whether `other` reads the decoder's tokens, whichever of them."""
        return isinstance(other, AttentionRetention) and other.hit_trim_tokens == self.hit_trim_tokens

    def describe(self) -> str:
        """Return "full attention"."""
        return self._with_trim("full attention")


@dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec):
    """Full attention with keys and values per token."""

    kind: ClassVar[str] = "full_attention"

    v_head_size: int | None = None  # again, to be the fourth argument in order

    def retention_key(self, limit: int) -> Retention:
        """Return `FullAttentionRetention`, whatever the limit."""
        return FullAttentionRetention(hit_trim_tokens=self.hit_trim_tokens)


SPEC = FullAttentionSpec
RETENTION = FullAttentionRetention
EXAMPLES = (
    FullAttentionSpec(3, 64, "bfloat16"),
    FullAttentionSpec(1, 256, "float32", block_size_multiple=1),
    FullAttentionSpec(5, 7, "int8", block_size_multiple=32),
    FullAttentionSpec(2, 24, "bfloat16", 16),
    FullAttentionSpec(1, 8, "float32", hit_trim_tokens=1),
)
