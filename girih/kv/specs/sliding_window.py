"""Sliding window attention: a token sees itself and the W - 1 tokens before it; older ones are freed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from girih.kv.retention import Count, Retention
from girih.kv.spec import check_sizes
from girih.kv.specs._attention import AttentionRetention, AttentionSpec
from girih.kv.specs.full_attention import FullAttentionRetention
from girih.units import cdiv


@dataclass(frozen=True)
class SlidingWindowRetention(AttentionRetention):
    """Keeps the last `window` tokens; the query at position p reads positions p - window + 1 .. p.

    Args:
        window: tokens a query sees, itself included.
    """

    window: int

    kind: ClassVar[str] = "sliding_window"

    def live_range(
        self, num_computed_tokens: Count, num_new_tokens: Count | int, block_size: int, num_lookahead_tokens: int = 0
    ) -> tuple[Count, Count]:
        """Return the blocks from the first new token's window to the last new token and the lookahead.

        The window slides by `num_computed_tokens`, the confirmed ones: a rejected draft must not have freed a block.
        """
        first_token = num_computed_tokens - (self.window - 1)
        first_token = first_token * (first_token > 0)  # max(0, first_token), of an int or an array
        end = num_computed_tokens + num_new_tokens + num_lookahead_tokens
        return first_token // block_size, -(-end // block_size)

    def blocks_held(self, num_tokens: int, block_size: int, num_lookahead_tokens: int = 0) -> int:
        """Return the most blocks held at any decode step up to `num_tokens`.

        W + lookahead consecutive tokens touch at most (W + lookahead - 2) // block_size + 2 blocks, which is
        reached once in every `block_size` steps.
        """
        at_most = (self.window + num_lookahead_tokens - 2) // block_size + 2
        return min(cdiv(num_tokens + num_lookahead_tokens, block_size), at_most)

    def peak_blocks(self, num_tokens: int, block_size: int, num_lookahead_tokens: int = 0) -> int:
        """Return the blocks of the W - 1 tokens before a block boundary, the block after it, and the lookahead's."""
        at_most = cdiv(self.window - 1, block_size) + 1 + cdiv(num_lookahead_tokens, block_size)
        return min(cdiv(num_tokens + num_lookahead_tokens, block_size), at_most)

    def covers(self, other: Retention) -> bool:
        """Tell whether `other` is a window that is no longer."""
        if not isinstance(other, SlidingWindowRetention):
            return False
        return other.window <= self.window and other.hit_trim_tokens == self.hit_trim_tokens

    def describe(self) -> str:
        """Return e.g. "sliding window 512"."""
        return self._with_trim(f"sliding window {self.window}")


@dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec):
    """Sliding window attention with keys and values per token.

    Args:
        sliding_window: tokens a query sees, itself included.
    """

    sliding_window: int

    kind: ClassVar[str] = "sliding_window"

    def __post_init__(self) -> None:
        """Refuse sizes below one, a window below one, and unknown dtypes."""
        super().__post_init__()
        check_sizes(self.kind, [("sliding_window", self.sliding_window)])

    def retention_key(self, limit: int) -> Retention:
        """Return the window, or full attention when no sequence can outgrow it."""
        return window_retention(self.sliding_window, limit, self.hit_trim_tokens)


def window_retention(window: int, limit: int, hit_trim_tokens: int = 0) -> Retention:
    """Return the retention of a window: full attention if it is as long as the longest sequence.

    Args:
        window: tokens a query sees, itself included.
        limit: the longest sequence in tokens.
        hit_trim_tokens: see `Retention.hit_trim_tokens`.
    """
    if window >= limit:
        return FullAttentionRetention(hit_trim_tokens=hit_trim_tokens)
    return SlidingWindowRetention(window, hit_trim_tokens=hit_trim_tokens)


SPEC = SlidingWindowSpec
RETENTION = SlidingWindowRetention
EXAMPLES = (
    SlidingWindowSpec(1, 256, "bfloat16", 512),
    SlidingWindowSpec(2, 64, "float32", 1, block_size_multiple=1),
    SlidingWindowSpec(4, 8, "float16", 17, block_size_multiple=4),
    SlidingWindowSpec(2, 16, "int8", 64, v_head_size=8),
)
