"""Chunked local attention: a token sees the tokens of its own chunk up to itself; a finished chunk is freed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from girih.kv.retention import Count, Retention
from girih.kv.spec import check_sizes
from girih.kv.specs._attention import AttentionRetention, AttentionSpec
from girih.kv.specs.full_attention import FullAttentionRetention
from girih.units import cdiv, round_up


@dataclass(frozen=True)
class ChunkedLocalRetention(AttentionRetention):
    """Keeps the chunk in progress; the query at position p reads positions p // chunk * chunk .. p.

    Args:
        chunk: tokens of a chunk.
    """

    chunk: int

    kind: ClassVar[str] = "chunked_local"

    def live_range(
        self, num_computed_tokens: Count, num_new_tokens: Count | int, block_size: int, num_lookahead_tokens: int = 0
    ) -> tuple[Count, Count]:
        """Return the blocks from the start of the first new token's chunk to the last new token and the lookahead."""
        end = num_computed_tokens + num_new_tokens + num_lookahead_tokens
        return num_computed_tokens // self.chunk * self.chunk // block_size, -(-end // block_size)

    def blocks_held(self, num_tokens: int, block_size: int, num_lookahead_tokens: int = 0) -> int:
        """Return the most blocks held at any decode step up to `num_tokens`: at the end of a chunk."""
        return max(
            cdiv(last + 1 + num_lookahead_tokens, block_size) - start // block_size
            for start, last in self._chunks(num_tokens, block_size)
        )

    def peak_blocks(self, num_tokens: int, block_size: int, num_lookahead_tokens: int = 0) -> int:
        """Return the most blocks of a step that starts at the end of a chunk and goes on to the next block boundary."""
        return max(
            cdiv(min(round_up(last + 1, block_size), num_tokens) + num_lookahead_tokens, block_size)
            - start // block_size
            for start, last in self._chunks(num_tokens, block_size)
        )

    def describe(self) -> str:
        """Return e.g. "chunked local 8192"."""
        return self._with_trim(f"chunked local {self.chunk}")

    def _chunks(self, num_tokens: int, block_size: int) -> list[tuple[int, int]]:
        # (first, last token) of the chunks below num_tokens; how they lie to the blocks repeats after `period` chunks
        period = block_size // math.gcd(block_size, self.chunk)
        num_chunks = max(1, cdiv(num_tokens, self.chunk))
        numbers = {*range(min(period, num_chunks)), *range(max(0, num_chunks - 2), num_chunks)}
        return [(n * self.chunk, min((n + 1) * self.chunk, num_tokens) - 1) for n in sorted(numbers)]


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Chunked local attention with keys and values per token.

    Args:
        attention_chunk_size: tokens of a chunk.
    """

    attention_chunk_size: int

    kind: ClassVar[str] = "chunked_local"

    def __post_init__(self) -> None:
        """Refuse sizes below one, a chunk below one, and unknown dtypes."""
        super().__post_init__()
        check_sizes(self.kind, [("attention_chunk_size", self.attention_chunk_size)])

    def retention_key(self, limit: int) -> Retention:
        """Return the chunk, or full attention when no sequence reaches a second chunk."""
        if self.attention_chunk_size >= limit:
            return FullAttentionRetention(hit_trim_tokens=self.hit_trim_tokens)
        return ChunkedLocalRetention(self.attention_chunk_size, hit_trim_tokens=self.hit_trim_tokens)


SPEC = ChunkedLocalAttentionSpec
RETENTION = ChunkedLocalRetention
EXAMPLES = (
    ChunkedLocalAttentionSpec(8, 128, "bfloat16", 8192),
    ChunkedLocalAttentionSpec(2, 16, "float32", 48, block_size_multiple=1),
    ChunkedLocalAttentionSpec(1, 8, "float16", 21),
)
