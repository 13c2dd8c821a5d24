"""Full attention: every token of the sequence is kept until the request ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from girih.kv.retention import Count, Retention
from girih.kv.specs._attention import AttentionSpec
from girih.units import cdiv

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class FullAttentionRetention(Retention):
    """Keeps all tokens."""

    kind: ClassVar[str] = "full_attention"

    def live_range(
        self, num_computed_tokens: Count, num_new_tokens: Count, block_size: int, num_lookahead_tokens: int = 0
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

    def hit_boundaries(self, cached: np.ndarray, block_size: int) -> np.ndarray:
        """Return True for boundaries with every block before them cached; see `Retention.hit_boundaries`."""
        import numpy as np  # here, so that planning starts without numpy

        hits = np.ones(len(cached) + 1, dtype=bool)
        np.logical_and.accumulate(cached, out=hits[1:])
        return hits

    def describe(self) -> str:
        """Return "full attention"."""
        return "full attention"


@dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec):
    """Full attention with keys and values per token."""

    kind: ClassVar[str] = "full_attention"

    def retention_key(self, limit: int) -> Retention:
        """Return `FullAttentionRetention`, whatever the limit."""
        return FullAttentionRetention()


SPEC = FullAttentionSpec
RETENTION = FullAttentionRetention
EXAMPLES = (
    FullAttentionSpec(3, 64, "bfloat16"),
    FullAttentionSpec(1, 256, "float32", block_size_multiple=1),
    FullAttentionSpec(5, 7, "int8", block_size_multiple=32),
)
