"""Which tokens of a sequence a group of layers keeps, and for how long.

A `Retention` is what `KVCacheSpec.retention_key(limit)` returns: a small frozen value that is both the
key (equal retentions share one block table) and the behaviour (the planner and the manager ask it, and
never ask a spec for its type). It knows no bytes. Each kind lives beside its spec in `kv/specs/`.

All token counts may be ints or integer arrays; the arithmetic is the same, so that the manager asks for
a whole batch at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    import numpy as np

NO_LIMIT = 1 << 62  # tokens; no window reaches it

# an int, or an int array with one element per row
Count = TypeVar("Count", int, "np.ndarray")


class Retention(ABC):
    """A rule for which blocks of one sequence must be live; subclasses are frozen dataclasses."""

    kind: ClassVar[str]
    """The name in JSON and in reports, e.g. "full_attention"."""

    holds_state: ClassVar[bool] = False
    """A page is not a block of tokens but a state: the sum of all tokens before it."""

    prefix_cacheable: ClassVar[bool] = True
    """The cache depends on the tokens alone, so that equal prefixes can share it."""

    hit_trim_tokens: int = 0
    """How many tokens beyond a prefix must be equal too: 1 for a draft head whose entry i depends on token i + 1."""

    @abstractmethod
    def live_range(
        self, num_computed_tokens: Count, num_new_tokens: Count | int, block_size: int, num_lookahead_tokens: int = 0
    ) -> tuple[Count, Count]:
        """Say which blocks a step needs that computes `num_new_tokens` after `num_computed_tokens`.

        Returns:
            (first, last): block columns first..last-1 must have pages; all before `first` may be freed.
        """

    @abstractmethod
    def blocks_held(self, num_tokens: int, block_size: int, num_lookahead_tokens: int = 0) -> int:
        """Count the most live blocks at any decode step of a sequence on its way to `num_tokens` tokens, 0 or more."""

    @abstractmethod
    def peak_blocks(self, num_tokens: int, block_size: int, num_lookahead_tokens: int = 0) -> int:
        """Count the most blocks a lone sequence holds at any step on its way to `num_tokens` tokens, 0 or more.

        Steps compute at most up to the next block boundary, which is what the scheduler shrinks to
        before it gives up.
        """

    def hit_first(self, num_tokens: Count, unit_tokens: int) -> Count:
        """Return the first unit that a continuation behind `num_tokens` reused tokens reads from the cache.

        A prefix can be reused if the group has every unit from this one up to the prefix' end, and
        `hit_trim_tokens` beyond. What is kept for later prompts follows from the same function.

        Args:
            num_tokens: length of the prefix.
            unit_tokens: tokens per unit; unit i is tokens i * unit_tokens up to (i + 1) * unit_tokens - 1.
        """
        return self.live_range(num_tokens, 1, unit_tokens)[0]

    def covers(self, other: Retention) -> bool:
        """Tell whether whatever `other` keeps is kept here too, so that a layer with `other` can read this cache."""
        return self == other

    def table_width(self, max_model_len: int, block_size: int, num_lookahead_tokens: int = 0) -> int:
        """Return the columns of this group's block table."""
        return -(-(max_model_len + num_lookahead_tokens) // block_size)

    @abstractmethod
    def describe(self) -> str:
        """Return a few words for reports, e.g. "sliding window 512"."""

    def to_json(self) -> dict[str, Any]:
        """Return {"kind": ..., plus the dataclass fields}; the inverse is `specs.retention_from_json`."""
        return {"kind": self.kind, **vars(self)}
