"""Which prefix of a prompt is reused: the longest one that every group can serve and that leaves room for the rest.

And which columns a later prompt would start from, so that their pages are worth keeping.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from girih.kv.block_pool import BlockPool
from girih.kv.capacity import peak_pages
from girih.kv.config import KVCacheConfig
from girih.kv.retention import Retention


@dataclass(frozen=True)
class Hit:
    """A reusable prefix and what it takes to run the request behind it.

    Args:
        num_blocks: blocks to reuse, the same in every group.
        first: per group, the first of these columns that is still needed.
        pages: per group, int32; page numbers of columns first..num_blocks-1.
        fits: whether the whole request fits beside the pages referenced now.
    """

    num_blocks: int
    first: Sequence[int]
    pages: Sequence[np.ndarray]
    fits: bool


class HitFinder:
    """The rules of reuse for one plan and pool.

    Args:
        config: the plan.
        block_size: of all groups.
        pool: the pool.
    """

    def __init__(self, config: KVCacheConfig, block_size: int, pool: BlockPool):
        self.block_size = block_size
        self._config, self._pool = config, pool
        self._nothing = np.zeros(len(config.groups), dtype=np.int64)

    def longest(self, found: np.ndarray) -> int:
        """Return the last block boundary at which every group has what its next token reads.

        Args:
            found: int32 [num_blocks, num_groups]; page numbers by block, 0 where a group has none.
        """
        hits = np.ones(len(found) + 1, dtype=bool)
        for group, spec in enumerate(self._config.groups):
            hits &= _boundaries(spec.retention, found[:, group] > 0, self.block_size)
        return int(np.flatnonzero(hits)[-1])

    def choose(self, found: np.ndarray, num_tokens: int, spoken_for: np.ndarray | int = 0) -> Hit:
        """Return the longest hit, or none where only this leaves room.

        Cached pages may lie scattered over so many slabs that pinning them blocks other groups; then the prefix is
        computed again, and its pages are evicted as any others.

        Args:
            found: as in `longest`.
            num_tokens: all known tokens of the request.
            spoken_for: int64 [num_groups]; pages that must be left for others.
        """
        hit = self._pin(found, self.longest(found), num_tokens, spoken_for)
        if hit.num_blocks and not hit.fits:
            nothing = self._pin(found, 0, num_tokens, spoken_for)
            return nothing if nothing.fits else hit
        return hit

    def first_column(self, group: int, num_blocks: int) -> int:
        """Return the first column that a group needs of a sequence whose first `num_blocks` blocks are computed."""
        retention = self._config.groups[group].retention
        return int(retention.live_range(num_blocks * self.block_size, 1, self.block_size)[0])

    def _pin(self, found: np.ndarray, num_blocks: int, num_tokens: int, spoken_for: np.ndarray | int) -> Hit:
        groups, limit = self._config.groups, self._config.max_model_len
        first = [self.first_column(group, num_blocks) for group in range(len(groups))]
        pages = [np.ascontiguousarray(found[start:num_blocks, group]) for group, start in enumerate(first)]
        need = peak_pages(groups, min(num_tokens + 1, limit), self._config.num_lookahead_tokens)
        for group, spec in enumerate(groups):
            # a shared page that leaves the window makes no room: only pages that stay to the end count once
            stays, _ = spec.retention.live_range(num_tokens - 1, 1, self.block_size)
            need[group] -= min(need[group], max(0, num_blocks - max(first[group], stays)))
        short = self._pool.slabs_short(np.array(need, dtype=np.int64) + spoken_for, self._nothing, pages)
        return Hit(num_blocks, first, pages, short <= 0)


def _boundaries(retention: Retention, cached: np.ndarray, unit_tokens: int) -> np.ndarray:
    # bool [num_units + 1]: whether the first b units can be taken as computed, from cached, bool [num_units]
    bounds = np.arange(len(cached) + 1)
    num_cached = np.concatenate(([0], np.cumsum(cached)))
    first = retention.hit_first(bounds * unit_tokens, unit_tokens)
    return num_cached[bounds] - num_cached[first] == bounds - first


class WarmColumns:
    """Of each row, the columns before two boundaries that a later prompt is likely to start from.

    One is the last boundary of the row's own prompt, for a repeated or continued one. The other is where the prompt
    left what the cache knew when it came: prompts branch off there, and the next one will, too. A page that leaves a
    window is kept longer if it is among the columns that a start from such a boundary needs.

    Args:
        hits: knows what a start needs.
        num_groups: groups.
        max_num_seqs: rows.
    """

    def __init__(self, hits: HitFinder, num_groups: int, max_num_seqs: int):
        self._hits = hits
        self._num_groups = num_groups
        self._bounds = np.zeros((2, 2, num_groups, max_num_seqs), dtype=np.int64)  # [first or end, boundary, ...]

    def start(self, row: int, num_prompt_tokens: int, found: np.ndarray) -> None:
        """Note the boundaries of a new row.

        Args:
            row: the row.
            num_prompt_tokens: its prompt; what was sampled before a preemption is no place to start from.
            found: int32 [num_blocks, num_groups]; what the cache had of its tokens, as in `HitFinder.longest`.
        """
        size = self._hits.block_size
        branch = int(np.logical_and.accumulate((found > 0).any(axis=1)).sum())
        # a repeated prompt computes its last token again, a continued one starts behind it
        boundaries = [((num_prompt_tokens - 1) // size, num_prompt_tokens // size), (branch, branch)]
        for which, (boundary, end) in enumerate(boundaries):
            for group in range(self._num_groups):
                self._bounds[:, which, group, row] = self._hits.first_column(group, boundary), end

    def contains(self, group: int, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Tell which (row, column) pairs are among them, bool [n]."""
        first, end = self._bounds[:, :, group, rows]
        return ((first <= columns) & (columns < end)).any(axis=0)
