"""Cross attention of an encoder-decoder: keys and values of the encoder's output, as many as the encoder has positions.

They do not grow while the decoder runs, and they depend on the encoder's input, which prefix keys do not cover.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from girih.kv.retention import Count, Retention
from girih.kv.spec import check_sizes
from girih.kv.specs._attention import AttentionSpec
from girih.units import cdiv


@dataclass(frozen=True)
class CrossAttentionRetention(Retention):
    """Keeps all positions of the encoder from the first step to the last.

    Args:
        num_encoder_tokens: positions.
    """

    num_encoder_tokens: int

    kind: ClassVar[str] = "cross_attention"
    prefix_cacheable: ClassVar[bool] = False

    def live_range(
        self, num_computed_tokens: Count, num_new_tokens: Count | int, block_size: int, num_lookahead_tokens: int = 0
    ) -> tuple[Count, Count]:
        """Return (0, blocks of the encoder), whatever the decoder does."""
        none = num_computed_tokens * 0
        return none, none + cdiv(self.num_encoder_tokens, block_size)

    def blocks_held(self, num_tokens: int, block_size: int, num_lookahead_tokens: int = 0) -> int:
        """Return the blocks of the encoder."""
        return cdiv(self.num_encoder_tokens, block_size)

    def peak_blocks(self, num_tokens: int, block_size: int, num_lookahead_tokens: int = 0) -> int:
        """Return the blocks of the encoder."""
        return cdiv(self.num_encoder_tokens, block_size)

    def table_width(self, max_model_len: int, block_size: int, num_lookahead_tokens: int = 0) -> int:
        """Return the blocks of the encoder."""
        return cdiv(self.num_encoder_tokens, block_size)

    def describe(self) -> str:
        """Return e.g. "cross attention 1500"."""
        return f"cross attention {self.num_encoder_tokens}"


@dataclass(frozen=True)
class CrossAttentionSpec(AttentionSpec):
    """Cross attention with keys and values per encoder position.

    Args:
        num_encoder_tokens: positions of the encoder's output.
    """

    num_encoder_tokens: int

    kind: ClassVar[str] = "cross_attention"

    def __post_init__(self) -> None:
        """Refuse sizes below one and unknown dtypes."""
        super().__post_init__()
        check_sizes(self.kind, [("num_encoder_tokens", self.num_encoder_tokens)])

    def retention_key(self, limit: int) -> Retention:
        """Return all positions of the encoder, whatever the limit."""
        return CrossAttentionRetention(self.num_encoder_tokens)


SPEC = CrossAttentionSpec
RETENTION = CrossAttentionRetention
EXAMPLES = (
    CrossAttentionSpec(6, 64, "float32", 1500),
    CrossAttentionSpec(1, 16, "bfloat16", 7, block_size_multiple=1),
)
