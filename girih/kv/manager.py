"""`KVCacheManager`: which pages hold each running request's cache, and which prefixes can be reused.

One step, as the scheduler drives it:

    reserve     pages for the tokens that running rows will compute
    publish     prompt blocks of scheduled rows become findable, so that requests of the same step share them
    can_admit, admit, reserve, publish       for each waiting request
    take_table_updates                       what the workers must be told
    advance     after the step: tokens are computed, blocks leave their window
    commit      sampled tokens; blocks that are full of computed tokens and not findable yet become so
    free        finish, abort, preempt: all the same here

Rows are stable from `admit` to `free`. A waiting request owns nothing, and `lookup` and `can_admit` change nothing.
Composes `BlockPool` (pages), `BlockTables` (who has which), `BlockHasher` and `PrefixIndex` (what can be found).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from girih.errors import PlanError
from girih.kv import capacity
from girih.kv.block_pool import BlockPool
from girih.kv.block_tables import BlockTables
from girih.kv.config import KVCacheConfig, KVCacheGroupSpec
from girih.kv.hashing import BlockHasher
from girih.kv.hits import HitFinder, WarmColumns
from girih.kv.invariants import check_pool, count_references
from girih.kv.prefix import PrefixIndex
from girih.kv.promise import SlabPromise
from girih.kv.row_keys import NO_KEYS, RowKeys
from girih.messages import CacheUpdate


@dataclass(frozen=True)
class CacheStats:
    """The cache's counters and its state now.

    Args:
        tokens_looked_up: tokens of all admitted requests that were allowed to read the cache.
        tokens_hit: how many of them were reused.
        pages_evicted: cached pages given up for new ones.
        num_free_slabs: slabs that no group has borrowed.
        slabs: per group, borrowed slabs.
        free_pages: per group, pages of its slabs that hold nothing.
        cached_pages: per group, pages that only the prefix cache holds.
        referenced_pages: per group, pages in block tables.
    """

    tokens_looked_up: int
    tokens_hit: int
    pages_evicted: int
    num_free_slabs: int
    slabs: tuple[int, ...]
    free_pages: tuple[int, ...]
    cached_pages: tuple[int, ...]
    referenced_pages: tuple[int, ...]


class KVCacheManager:
    """The run time of one plan.

    Args:
        config: the plan; all groups must have one block size.
        max_num_seqs: rows.
        enable_prefix_caching: reuse the cache of equal prefixes.
        secret: 16 bytes that key the hash, where processes share a cache; None takes random ones.

    Raises:
        PlanError: groups with different block sizes.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        max_num_seqs: int,
        enable_prefix_caching: bool = True,
        secret: bytes | None = None,
    ):
        block_sizes = sorted({group.block_size for group in config.groups})
        if len(block_sizes) > 1:
            raise PlanError(f"groups with block sizes {block_sizes} cannot share prefixes; plan them with one size")
        self.config = config
        self.block_size = block_sizes[0] if block_sizes else 1
        self.num_computed_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        """int32 [max_num_seqs]; tokens of each row whose cache is written."""
        self._caching = enable_prefix_caching and bool(config.groups)
        self._lookahead = config.num_lookahead_tokens
        self._retentions = [group.retention for group in config.groups]
        self._pool = BlockPool(config.num_slabs, [group.pages_per_slab for group in config.groups])
        self._tables = BlockTables(config, max_num_seqs)
        self._keys = RowKeys(BlockHasher(self.block_size, secret), max_num_seqs)
        self._index = PrefixIndex(self._pool.max_pages, len(config.groups), self._pool.tags)
        self._free_rows = [*range(max_num_seqs - 1, -1, -1)]
        self._held = np.zeros(max_num_seqs, dtype=bool)
        self._hits = HitFinder(config, self.block_size, self._pool)
        self._warm = WarmColumns(self._hits, len(config.groups), max_num_seqs)
        self._promise = SlabPromise(config, self.block_size)
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)  # known tokens, computed or not
        self._tokens_looked_up = self._tokens_hit = self._pages_evicted = 0

    @property
    def groups(self) -> tuple[KVCacheGroupSpec, ...]:
        """Return the groups of all stage classes."""
        return self.config.groups

    @property
    def max_request_tokens(self) -> int:
        """Return the longest request in tokens that can run alone."""
        return min(self.config.max_model_len, capacity.max_request_tokens(self.config))

    @property
    def num_running(self) -> int:
        """Return the rows held now."""
        return len(self._held) - len(self._free_rows)

    @property
    def usage(self) -> float:
        """Return the share of slabs with a referenced page, 0 to 1."""
        return int(self._pool.counts()["busy_slabs"].sum()) / max(1, self.config.num_slabs)

    def stats(self) -> CacheStats:
        """Return counters and state."""
        counts = {name: tuple(values.tolist()) for name, values in self._pool.counts().items()}
        return CacheStats(
            tokens_looked_up=self._tokens_looked_up,
            tokens_hit=self._tokens_hit,
            pages_evicted=self._pages_evicted,
            num_free_slabs=self._pool.num_free_slabs,
            slabs=counts["slabs"],
            free_pages=counts["free"],
            cached_pages=counts["cached"],
            referenced_pages=counts["referenced"],
        )

    def lookup(self, token_ids: np.ndarray, salt: str = "") -> int:
        """Return the longest prefix that could be reused now, in tokens; at least one token is left to compute.

        Args:
            token_ids: int [num_tokens].
            salt: only requests with the same salt share prefixes.
        """
        return self._hits.longest(self._find(token_ids, salt)) * self.block_size

    def can_admit(
        self, token_ids: np.ndarray, salt: str = "", *, read_cache: bool = True, spoken_for: np.ndarray | int = 0
    ) -> bool:
        """Tell whether a row is free and the request fits beside the pages referenced now.

        What must fit is its peak on the way to one token more than it knows, with its shared pages counted once, in
        the slabs as they are: pages cannot move, so half-empty slabs of others do not count as room. For a pool
        without referenced pages this is `capacity.slabs_needed`, the formula of start-up: there, everything up to
        `max_model_len` is admitted.

        Args:
            token_ids: int [num_tokens]; all known tokens, of the prompt and sampled before a preemption.
            salt: as in `lookup`.
            read_cache: as in `admit`.
            spoken_for: int64 [num_groups]; pages that rows were admitted for and do not hold yet.
        """
        found = self._find(token_ids, salt, read_cache)
        return bool(self._free_rows) and self._hits.choose(found, len(token_ids), spoken_for).fits

    def admit(
        self, token_ids: np.ndarray, *, num_prompt_tokens: int, salt: str = "", read_cache: bool = True
    ) -> tuple[int, int]:
        """Take a row and pin the pages of the reusable prefix.

        A prefix whose cached pages lie so scattered that the request would not fit is computed again instead.

        Args:
            token_ids: int [num_tokens]; all known tokens.
            num_prompt_tokens: how many of them are the prompt.
            salt: as in `lookup`.
            read_cache: False computes everything; the results are published all the same.

        Returns:
            (row, num_cached_tokens); num_computed_tokens[row] is set to the latter.
        """
        found = self._find(token_ids, salt, read_cache)
        hit = self._hits.choose(found, len(token_ids))
        assert self._free_rows, "admit without a free row; ask can_admit first"
        row = self._free_rows.pop()
        self._held[row] = True
        for group, pages in enumerate(hit.pages):
            self._pool.pin(group, pages)
            self._tables.place(group, row, hit.first[group], pages - self._pool.first_page[group])
        num_cached_tokens = hit.num_blocks * self.block_size
        self._tokens_looked_up += len(token_ids) * (read_cache and self._caching)
        self._tokens_hit += num_cached_tokens
        self.num_computed_tokens[row] = num_cached_tokens
        self._num_tokens[row] = len(token_ids)
        if self._caching:
            self._keys.start(row, token_ids, salt, hit.num_blocks)
            self._warm.start(row, num_prompt_tokens, found)
        return row, num_cached_tokens

    def reserve(self, rows: np.ndarray, num_new_tokens: np.ndarray) -> int:
        """Make pages for the next tokens of rows, in order; stop before the first row that cannot have all of its.

        Cached pages are evicted as needed. A row that is not served is left as it was.

        Args:
            rows: int [n].
            num_new_tokens: int [n]; tokens after num_computed_tokens, within the plan's max_model_len.

        Returns:
            How many rows were served.
        """
        need = self._pages_needed(rows, num_new_tokens)
        growing = np.flatnonzero(need.any(axis=1))
        if not len(growing):
            return len(rows)
        floor, promised = self._floors(rows[growing[0]], num_new_tokens[growing[0]])
        served, pages = self._pool.allocate(need[growing], floor, promised)
        self._pages_evicted += self._forget_evicted()
        for group, numbers in enumerate(pages):
            if len(numbers):
                done = growing[:served]
                block_ids = numbers - self._pool.first_page[group]
                self._tables.append(group, rows[done], need[done, group], block_ids)
        return len(rows) if served == len(growing) else int(growing[served])

    def max_new_tokens(self, row: int, limit: int) -> int:
        """Return the largest n <= limit for which `reserve` of this row alone would succeed now; 0 if for none.

        Args:
            row: the row.
            limit: tokens, within the plan's max_model_len.
        """
        if self._can_reserve(row, limit):
            return limit
        to_boundary = self.block_size - int(self.num_computed_tokens[row]) % self.block_size
        chunks = range(min(to_boundary, limit), limit, self.block_size)
        served = bisect_left(chunks, True, key=lambda chunk: not self._can_reserve(row, chunk))
        return chunks[served - 1] if served else 0

    def publish(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """Make blocks findable that lie wholly inside the first tokens of rows and were known when admitted.

        Call it when these tokens are scheduled and reserved, after the last preemption that could undo it.

        Args:
            rows: int [n].
            num_tokens: int [n]; computed and scheduled tokens of each row.
        """
        pending = self._keys.has_unpublished[rows]  # none without caching
        for row, count in zip(rows[pending].tolist(), num_tokens[pending].tolist(), strict=True):
            until = min(count // self.block_size, int(self._tables.last[:, row].min()))
            first, keys = self._keys.take_prompt(row, until)
            if len(keys):
                self._publish(np.full(len(keys), row), first + np.arange(len(keys)), keys)

    def advance(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """Count scheduled tokens as computed and release the blocks that left a window.

        Findable pages stay cached. They go first when room is needed, except those that a repeated or continued
        prompt, or another one that branched off here, would start from.

        Args:
            rows: int [n], distinct.
            num_tokens: int [n].
        """
        self.num_computed_tokens[rows] += num_tokens
        computed = self.num_computed_tokens[rows].astype(np.int64)
        for group, retention in enumerate(self._retentions):
            first, _ = retention.live_range(computed, 1, self.block_size)
            moved = np.flatnonzero(first > self._tables.first[group, rows])
            if len(moved):
                flat_rows, columns, block_ids = self._tables.drop_before(group, rows[moved], first[moved])
                self._release(group, block_ids, self._warm.contains(group, flat_rows, columns))

    def commit(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Append one sampled token per row; blocks that are full of computed tokens become findable.

        Args:
            rows: int [n], distinct; every known token of theirs is computed.
            token_ids: int [n].
        """
        if self._caching:
            self.publish(rows, self._num_tokens[rows])  # a prompt's last block, if its last token was scheduled alone
            done, blocks, keys = self._keys.append(rows, self._num_tokens[rows], token_ids)
            if len(done):
                self._publish(done, blocks, keys)
        self._num_tokens[rows] += 1

    def free(self, row: int) -> None:
        """Give back a row and its pages; findable ones stay cached, the sequence's tail to be evicted first."""
        assert self._held[row], f"row {row} is freed, but it is free"
        for group in range(len(self._retentions)):
            block_ids = self._tables.clear(group, row)[::-1]
            self._release(group, block_ids, np.ones(len(block_ids), dtype=bool))
        self._keys.drop(row)
        self._held[row] = False
        self._free_rows.append(row)
        self.num_computed_tokens[row] = 0

    def update(
        self, rows: np.ndarray, num_tokens: np.ndarray, sampled_rows: np.ndarray, token_ids: np.ndarray
    ) -> None:
        """Take in a step: `advance` its rows, `commit` the sampled tokens."""
        self.advance(rows, num_tokens)
        self.commit(sampled_rows, token_ids)

    def take_cache_update(self, rows: np.ndarray, num_scheduled_tokens: np.ndarray) -> CacheUpdate:
        """Return what the workers must do to the cache before the next step, freed rows included."""
        return CacheUpdate((), (), self._tables.take_updates(), {})

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix, as after a change of the weights.

        Returns:
            False, with nothing done, while rows are held.
        """
        if self.num_running:
            return False
        self._pool.evict_all()
        self._forget_evicted()
        return True

    def check(self) -> None:
        """Raise AssertionError that names the broken invariant; slow, for tests and debug runs.

        Held: free, cached and referenced pages are all pages; references are block table entries; a key leads to
        pages that carry it; no page is in two groups; no count is negative.
        """
        assert not self._held[self._free_rows].any(), "a free row is held"
        assert self._held.sum() == self.num_running, "a row is neither held nor free"
        check_pool(self._pool, count_references(self._tables, self._held))
        self._index.check()
        assert (self._num_tokens >= self.num_computed_tokens)[self._held].all(), "a row computed unknown tokens"

    def _find(self, token_ids: np.ndarray, salt: str, read_cache: bool = True) -> np.ndarray:
        # page numbers by block, int32 [blocks that could be reused, groups]; one token is left to compute
        at_most = max(0, len(token_ids) - 1) // self.block_size if self._caching and read_cache else 0
        keys = self._keys.of_prompt(token_ids, salt) if at_most else NO_KEYS
        return self._index.find(keys[:at_most])

    def _pages_needed(self, rows: np.ndarray, num_new_tokens: np.ndarray) -> np.ndarray:
        # int64 [rows, groups]
        need = np.zeros((len(rows), len(self._retentions)), dtype=np.int64)
        computed = self.num_computed_tokens[rows].astype(np.int64)
        for group, retention in enumerate(self._retentions):
            _, last = retention.live_range(computed, num_new_tokens, self.block_size, self._lookahead)
            np.maximum(last - self._tables.last[group, rows], 0, out=need[:, group])
        return need

    def _can_reserve(self, row: int, num_new_tokens: int) -> bool:
        need = self._pages_needed(np.array([row]), np.array([num_new_tokens]))
        floor, _ = self._floors(row, num_new_tokens)
        return self._pool.slabs_short(need[0], floor) <= 0

    def _floors(self, row: int, num_new_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        return self._promise.floors(self.num_running, int(self.num_computed_tokens[row]), int(num_new_tokens))

    def _publish(self, rows: np.ndarray, columns: np.ndarray, keys: np.ndarray) -> None:
        pages = np.zeros((len(rows), len(self._retentions)), dtype=np.int32)
        for group, (table, null_id) in enumerate(zip(self._tables.tables, self._tables.null_ids, strict=True)):
            block_ids = table[rows, columns]
            pages[:, group] = np.where(block_ids == null_id, 0, block_ids + self._pool.first_page[group])
        replaced = self._index.publish(keys, pages, self._pool.references)
        for group, row in enumerate(replaced.T):
            if row.any():
                self._pool.evict(group, row[row > 0])
        self._forget_evicted()

    def _forget_evicted(self) -> int:
        evicted = self._pool.take_evicted()
        if len(evicted):
            self._index.forget(evicted)
        return len(evicted)

    def _release(self, group: int, block_ids: np.ndarray, warm: np.ndarray) -> None:
        pages = (block_ids + self._pool.first_page[group]).astype(np.int32)
        self._pool.release(group, pages, warm)
