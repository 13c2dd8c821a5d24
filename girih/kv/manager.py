"""`KVCacheManager`: which pages hold each running request's cache, and which prefixes can be reused.

One step, as the scheduler drives it:

    reserve             pages for the tokens that running rows will compute
    publish             prompt units of scheduled rows become findable, so that requests of the same step share them
    admit, reserve, publish                  for each waiting request
    take_cache_update   what the workers must be told
    advance             its tokens count as computed and blocks leave their window: workers do steps strictly in order
    commit              its result is back: sampled tokens are appended; `update` is both in one
    free                finish, abort, preempt: all the same here

Rows are stable from `admit` to `free`. A waiting request owns nothing, and `lookup` and `can_admit` change nothing.
What fits is exact: as pages move between slabs, only their number counts.

This is the face of compiled functions over one value of arrays, `ManagerState` (state.py): admission.py, stepping.py,
checkpoints.py, holdings.py, updates.py; the pages themselves are the pool's (page_pool.py), the keys the index's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from girih.kv import admission, capacity, stepping
from girih.kv import state as s
from girih.kv.admission import NO_ROOM, NO_ROW
from girih.kv.checkpoints import plan_cuts
from girih.kv.compiled import Record
from girih.kv.config import KVCacheConfig, KVCacheGroupSpec, one_per_class
from girih.kv.event_log import take_events, tell_anew
from girih.kv.events import KVEvents
from girih.kv.hashing import TokenHasher
from girih.kv.invariants import check_state
from girih.kv.page_pool import PagePool
from girih.kv.pool_map import ClassMap, PageUse, find_page, map_pool
from girih.kv.stats import CacheStats
from girih.kv.updates import UpdateMaker
from girih.messages import CacheUpdate

NO_ROWS = np.zeros(0, dtype=np.int64)
NO_TOKENS = np.zeros(0, dtype=np.int32)

MAX_SALTS_KNOWN = 1024
"""Of the salts, the keys that stand before their first unit are remembered for so many."""


class KVCacheManager:
    """The run time of one plan.

    Args:
        configs: the plan, or those of all workers.
        max_num_seqs: rows.
        enable_prefix_caching: reuse the cache of equal prefixes.
        secret: 16 bytes that key the hash, where processes share a cache; None takes random ones.
        state_checkpoint_tokens: distance of the recurrent states kept within a prompt.
        log_events: keep what `take_events` returns.
    """

    def __init__(
        self,
        configs: KVCacheConfig | Sequence[KVCacheConfig],
        *,
        max_num_seqs: int,
        enable_prefix_caching: bool = True,
        secret: bytes | None = None,
        state_checkpoint_tokens: int = 8192,
        log_events: bool = False,
    ):
        self.configs = one_per_class([configs] if isinstance(configs, KVCacheConfig) else configs)
        self.groups: tuple[KVCacheGroupSpec, ...] = tuple(group for config in self.configs for group in config.groups)
        """The groups of all stage classes."""
        self.unit = s.unit_tokens(self.groups)
        """Tokens per unit of a prefix."""
        self.max_request_tokens = min(
            min(config.max_model_len, capacity.max_request_tokens(config)) for config in self.configs
        )
        """The longest request in tokens that can run alone."""
        self._caching = (
            enable_prefix_caching
            and bool(self.groups)
            and all(group.retention.prefix_cacheable for group in self.groups)
        )
        self._pool = PagePool(
            [config.num_slabs for config in self.configs],
            class_of_group=[index for index, config in enumerate(self.configs) for _ in config.groups],
            pages_per_slab=[group.pages_per_slab for group in self.groups],
            page_bytes=[group.page_size_bytes for group in self.groups],
            tags_per_page=max((group.block_size // self.unit for group in self._attention_groups()), default=1),
        )
        self._hasher = TokenHasher(self.unit, secret)
        self._state = s.make_state(
            self.configs,
            self._pool.state,
            max_num_seqs=max_num_seqs,
            secret=self._hasher.secret,
            open_root=self._hasher.root(""),
            caching=self._caching,
            log_events=log_events,
            checkpoint_tokens=-(-state_checkpoint_tokens // self.unit) * self.unit,
        )
        self._record = Record(self._state)
        self._has_states = bool(self._state.consts[s.HAS_STATES])
        null_ids = [config.null_block_id(index) for config in self.configs for index in range(len(config.groups))]
        self._updates = UpdateMaker(self._state, self._record, np.array(null_ids, dtype=np.int64))
        self.num_computed_tokens = self._state.rows[:, s.COMPUTED]
        """int64 [max_num_seqs]; tokens of each row whose cache is written."""
        self._free_rows = [*range(max_num_seqs - 1, -1, -1)]
        self._roots = {"": self._state.log.open_root}
        self._peaks: dict[int, np.ndarray] = {}
        self._nobody = np.zeros(len(self.groups), dtype=np.int64)
        self._retentions = tuple(group.retention for group in self.groups)
        self._compile()

    def _compile(self) -> None:
        # what each step calls, for the types that it is called with
        record, rows, numbers, pages = self._record, NO_ROWS, NO_TOKENS, self._nobody
        self._admit_row = admission.admit_row.bound(record, 0, numbers, 0, self._roots[""], True, pages, pages)
        self._reserve_rows = stepping.reserve_rows.bound(record, rows, numbers)
        self._publish_rows = stepping.publish_rows.bound(record, rows, numbers)
        self._update_rows = stepping.update_rows.bound(record, rows, numbers, rows, numbers)
        self._free_row = stepping.free_row.bound(record, 0)

    @property
    def num_running(self) -> int:
        """Return the rows held now."""
        return len(self._state.rows) - len(self._free_rows)

    @property
    def usage(self) -> float:
        """Return the share of slabs with a referenced page, 0 to 1."""
        return int(self._pool.counts()["busy_slabs"].sum()) / max(1, sum(c.num_slabs for c in self.configs))

    def stats(self) -> CacheStats:
        """Return counters and state."""
        return CacheStats.of(self._state, self._pool)

    def pool_map(self) -> tuple[ClassMap, ...]:
        """Return what the pages of each stage class are used for now."""
        return map_pool(self._state)

    def find_page(self, group: int, page: int) -> tuple[bool, tuple[PageUse, ...]]:
        """Return whether a later prompt can find a page, by its id in the group, and what rows hold it for.

        Raises:
            RequestError: there is no such page.
        """
        return find_page(self._state, group, page)

    def lookup(self, token_ids: np.ndarray, salt: str = "") -> int:
        """Return the longest prefix that could be reused now, in tokens; at least one token is left to compute.

        Args:
            token_ids: int [num_tokens].
            salt: only requests with the same salt share prefixes.
        """
        return admission.look_up(self._record, _int32(token_ids), self._root(salt))

    def can_admit(
        self, token_ids: np.ndarray, salt: str = "", *, read_cache: bool = True, spoken_for: np.ndarray | None = None
    ) -> bool:
        """Tell whether `admit` would take this request now; arguments as there."""
        return bool(self._free_rows) and self._ask(NO_ROW, token_ids, 0, salt, read_cache, spoken_for) != NO_ROOM

    def admit(
        self,
        token_ids: np.ndarray,
        *,
        num_prompt_tokens: int,
        salt: str = "",
        read_cache: bool = True,
        spoken_for: np.ndarray | None = None,
    ) -> tuple[int, int] | None:
        """Take a row and pin the pages of the reusable prefix, if the request fits beside the pages referenced now.

        What must fit is its peak on the way to one token more than it knows, with its shared pages counted once. For
        a pool without referenced pages this is `capacity.slabs_needed`, the formula of start-up: there, everything up
        to `max_model_len` is admitted; nothing longer ever is. A prefix is left unused where only without it there is
        room.

        Args:
            token_ids: int32 [num_tokens]; all known tokens, of the prompt and sampled before a preemption.
            num_prompt_tokens: how many of them are the prompt.
            salt: as in `lookup`.
            read_cache: False computes everything; the results are published all the same.
            spoken_for: int64 [num_groups]; pages that rows were admitted for and do not hold yet.

        Returns:
            (row, num_cached_tokens), and num_computed_tokens[row] is set to the latter; None if there is no room, or no
            row.
        """
        if not self._free_rows:
            return None
        row = self._free_rows[-1]
        num_cached_tokens = self._ask(row, token_ids, num_prompt_tokens, salt, read_cache, spoken_for)
        if num_cached_tokens == NO_ROOM:
            return None
        self._free_rows.pop()
        return row, num_cached_tokens

    def reserve(self, rows: np.ndarray, num_new_tokens: np.ndarray) -> int:
        """Make pages for the next tokens of rows, in order; stop before the first row that cannot have all of its.

        Cached pages are evicted, and pages moved, as needed. A row that is not served is left as it was.

        Args:
            rows: int [n].
            num_new_tokens: int [n]; tokens after num_computed_tokens, within the plan's max_model_len.

        Returns:
            How many rows were served.
        """
        return self._reserve_rows(self._record, _rows(rows), _int32(num_new_tokens))

    def max_new_tokens(self, row: int, limit: int) -> int:
        """Return the largest n <= limit for which `reserve` of this row alone would succeed now; 0 if for none.

        Args:
            row: the row.
            limit: tokens, at least 1, within the plan's max_model_len.
        """
        return stepping.largest_chunk(self._record, row, limit)

    def publish(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """Make units findable that lie wholly inside the first tokens of rows, and plan their checkpoints.

        Call it when these tokens are scheduled and reserved, after the last preemption that could undo it.

        Args:
            rows: int [n].
            num_tokens: int [n]; computed and scheduled tokens of each row.
        """
        if self._caching:
            rows, num_tokens = _rows(rows), _int32(num_tokens)
            self._publish_rows(self._record, rows, num_tokens)
            if self._has_states:
                plan_cuts(self._record, rows, num_tokens)

    def update(self, rows: np.ndarray, num_tokens: np.ndarray, sampled_rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Take in a step's result: scheduled tokens are computed, what left a window is released, tokens are appended.

        Findable pages stay cached. They go first when room is needed, except those that a later prompt is likely to
        start from.

        Args:
            rows: int [n], distinct.
            num_tokens: int [n]; tokens of each row that count as computed now.
            sampled_rows: int [m], distinct; every known token of theirs is computed.
            token_ids: int [m].
        """
        self._update_rows(self._record, _rows(rows), _int32(num_tokens), _rows(sampled_rows), _int32(token_ids))

    def advance(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """Count scheduled tokens as computed; the first half of `update`."""
        self.update(rows, num_tokens, NO_ROWS, NO_TOKENS)

    def commit(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Append one sampled token per row; the second half of `update`."""
        self.update(NO_ROWS, NO_TOKENS, rows, token_ids)

    def free(self, row: int) -> None:
        """Give back a row and its pages; findable ones stay cached, the sequence's tail to be evicted first."""
        assert self._state.rows[row, s.HELD], f"row {row} is freed, but it is free"
        self._free_row(self._record, row)
        self._free_rows.append(row)

    def take_cache_update(self, rows: np.ndarray) -> CacheUpdate:
        """Return what the workers must do to the cache before the next step, for its rows, int [n], and freed ones."""
        return self._updates.take(_rows(rows))

    def resize(self, num_slabs: int, stage_class: int = 0) -> None:
        """Let the pool of a stage class have so many slabs from now on, at most those of the plan.

        Pages in the way move, which the next cache update tells the workers.

        Raises:
            CapacityError: the pages in use need more; nothing has changed.
        """
        self._pool.resize(stage_class, num_slabs, lambda: stepping.bring_up_to_date(self._record))

    def take_freed_slabs(self, stage_class: int = 0) -> np.ndarray:
        """Return the slabs, int64, that were used since the last call and that no group has borrowed now."""
        return self._pool.take_freed_slabs(stage_class)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix, as after a change of the weights.

        Returns:
            False, with nothing done, while rows are held.
        """
        if self.num_running:
            return False
        self._pool.evict_all()
        stepping.bring_up_to_date(self._record)
        tell_anew(self._state.log)
        return True

    def take_events(self) -> KVEvents:
        """Return what became findable and what is gone since the last call; nothing without `log_events`."""
        return take_events(self._state.log, self._state.prefix_index, self._retentions)

    def check(self) -> None:
        """Raise AssertionError that names the broken invariant; slow, for tests and debug runs.

        Held: free, cached and referenced pages are all pages; references are block table entries; a key leads to
        pages that carry it; no page is in two groups; no count is negative.
        """
        held = self._state.rows[:, s.HELD] > 0
        assert not held[self._free_rows].any(), "a free row is held"
        assert held.sum() == self.num_running, "a row is neither held nor free"
        check_state(self._state, self._pool)

    def _attention_groups(self) -> list[KVCacheGroupSpec]:
        return [group for group in self.groups if not group.retention.holds_state]

    def _ask(
        self, row: int, token_ids: np.ndarray, num_prompt_tokens: int, salt: str, read_cache: bool,
        spoken_for: np.ndarray | None,
    ) -> int:  # fmt: skip
        """Admit to a row, or only ask with `NO_ROW`; return the reused tokens or `NO_ROOM`."""
        spoken_for = self._nobody if spoken_for is None else np.ascontiguousarray(spoken_for, dtype=np.int64)
        peaks, root = self._peak_pages(len(token_ids) + 1), self._root(salt)
        token_ids = _int32(token_ids)
        return self._admit_row(self._record, row, token_ids, num_prompt_tokens, root, read_cache, peaks, spoken_for)

    def _root(self, salt: str) -> np.ndarray:
        root = self._roots.get(salt)
        if root is None:
            if len(self._roots) >= MAX_SALTS_KNOWN:
                self._roots.pop(next(iter(self._roots)))
            root = self._roots[salt] = self._hasher.root(salt)
        return root

    def _peak_pages(self, num_tokens: int) -> np.ndarray:
        """Return the most pages of each group, int64, that a request holds on its way to so many tokens."""
        num_tokens = min(num_tokens, self.configs[0].max_model_len)
        pages = self._peaks.get(num_tokens)
        if pages is None:
            counts = [
                capacity.peak_pages(config.groups, num_tokens, config.num_lookahead_tokens) for config in self.configs
            ]
            pages = self._peaks[num_tokens] = np.array([count for some in counts for count in some], dtype=np.int64)
        return pages


# one type of array each, so that each function is compiled once
def _rows(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.int64)


def _int32(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.int32)
