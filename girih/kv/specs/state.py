"""Recurrent state: fixed bytes per sequence, however long it is (Mamba, gated delta net, short convolution).

A page is one state. A running sequence writes to a page of its own; a copy after an exact number of tokens, a
checkpoint, can be published for other sequences to start from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from girih.errors import PlanError
from girih.kv.retention import Count, Retention
from girih.kv.spec import KVCacheSpec, PageTensor, heads_per_rank
from girih.units import dtype_bytes

Segments = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class StateRetention(Retention):
    """Keeps the state after the last token, and one more for each draft token that may be rejected.

    Its "blocks" are states: columns 0 .. num_lookahead_tokens of the table.
    """

    kind: ClassVar[str] = "state"
    holds_state: ClassVar[bool] = True

    def live_range(
        self, num_computed_tokens: Count, num_new_tokens: Count | int, block_size: int, num_lookahead_tokens: int = 0
    ) -> tuple[Count, Count]:
        """Return (0, 1 + lookahead)."""
        none = num_computed_tokens * 0
        return none, none + 1 + num_lookahead_tokens

    def blocks_held(self, num_tokens: int, block_size: int, num_lookahead_tokens: int = 0) -> int:
        """Return 1 + lookahead."""
        return 1 + num_lookahead_tokens

    def peak_blocks(self, num_tokens: int, block_size: int, num_lookahead_tokens: int = 0) -> int:
        """Return 1 + lookahead."""
        return 1 + num_lookahead_tokens

    def hit_first(self, num_tokens: Count, unit_tokens: int) -> Count:
        """Return the last unit of the prefix: the state behind it stands for all before."""
        last = num_tokens - 1
        return last * (last > 0) // unit_tokens

    def table_width(self, max_model_len: int, block_size: int, num_lookahead_tokens: int = 0) -> int:
        """Return 1 + lookahead."""
        return 1 + num_lookahead_tokens

    def describe(self) -> str:
        """Return "recurrent state"."""
        return "recurrent state"


@dataclass(frozen=True)
class StateSpec(KVCacheSpec):
    """The state of one recurrent layer: several tensors, each with its own dtype.

    Example, Mamba 2 with 48 heads of 64, one group and 128 states, a convolution over 4 tokens (`segments`: the
    convolution's channels are 3072 of the heads and 2 * 128 of the one group, B and C):
    `StateSpec(((3328, 3), (48, 64, 128)), ("bfloat16", "float32"), (((3072, 48), (256, 1)), ((48, 48),)))`.

    Args:
        shapes: of each tensor.
        dtypes: dtype name of each tensor.
        segments: of each tensor, what its first axis is made of, as (elements, heads): tensor-parallel ranks share the
            heads of a segment as `heads_per_rank` says. Empty: every element of the first axis is a head.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    segments: tuple[Segments, ...] = ()

    kind: ClassVar[str] = "state"

    def __post_init__(self) -> None:
        """Refuse sizes below one, unknown dtypes, and lists that do not match, naming the field."""
        for name in ("shapes", "dtypes", "segments"):  # JSON has lists
            object.__setattr__(self, name, _tuples(getattr(self, name)))
        if not self.shapes or len(self.shapes) != len(self.dtypes):
            raise PlanError(f"{self.kind}: {len(self.shapes)} shapes and {len(self.dtypes)} dtypes; give one of each")
        if any(not shape or min(shape) < 1 for shape in self.shapes):
            raise PlanError(f"{self.kind}: shapes={self.shapes} must have sizes of at least 1")
        if not self.segments:
            object.__setattr__(self, "segments", tuple(((shape[0], shape[0]),) for shape in self.shapes))
        if len(self.segments) != len(self.shapes):
            raise PlanError(f"{self.kind}: segments of {len(self.segments)} tensors and {len(self.shapes)} shapes")
        for shape, parts in zip(self.shapes, self.segments, strict=True):
            if sum(size for size, _ in parts) != shape[0] or any(heads < 1 or size % heads for size, heads in parts):
                raise PlanError(f"{self.kind}: segments {parts} do not make up the first axis of {shape}")
        for dtype in self.dtypes:
            dtype_bytes(dtype)

    def tensors(self, block_size: int) -> tuple[PageTensor, ...]:
        """Return "state_0", "state_1", ... with their own shapes, whatever the block size."""
        return tuple(
            PageTensor(f"state_{index}", shape, dtype)
            for index, (shape, dtype) in enumerate(zip(self.shapes, self.dtypes, strict=True))
        )

    def retention_key(self, limit: int) -> Retention:
        """Return `StateRetention`, whatever the limit."""
        return StateRetention()

    def shard(self, tensor_parallel_size: int) -> StateSpec:
        """Return the same with each rank's share of the heads on the first axis of each tensor."""
        mine = tuple(tuple(_share(part, tensor_parallel_size) for part in parts) for parts in self.segments)
        shapes = tuple(
            (sum(size for size, _ in parts), *shape[1:]) for parts, shape in zip(mine, self.shapes, strict=True)
        )
        return replace(self, shapes=shapes, segments=mine)


def _share(part: tuple[int, int], tensor_parallel_size: int) -> tuple[int, int]:
    size, heads = part
    mine = heads_per_rank(heads, tensor_parallel_size, "state heads")
    return size // heads * mine, mine


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value


SPEC = StateSpec
RETENTION = StateRetention
EXAMPLES = (
    StateSpec(((3, 64), (4, 16, 16)), ("bfloat16", "float32")),
    StateSpec(((5, 2),), ("float16",)),
    StateSpec(((40, 3), (4, 8, 8)), ("bfloat16", "float32"), (((32, 4), (8, 1)), ((4, 4),))),
)
