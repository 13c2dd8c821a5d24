"""Drive a real `KVCacheManager` with a toy scheduler and a memory that tells when a page holds the wrong tokens.

The model of the cache is `memory[group][page][slot] = the tokens up to and including the one written there`, for a
state `memory[group][page][0] = the tokens that went into it`. A step moves and copies pages, writes its tokens, then
every row reads all that its next token may attend to, and compares with its own tokens. Pages of different groups
that overlay each other in a slab destroy each other's contents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from page_pool_driver import call_evict

from girih.kv.config import KVCacheConfig, KVCacheGroupSpec
from girih.kv.manager import KVCacheManager
from girih.kv.retention import Retention
from girih.kv.stepping import bring_up_to_date
from girih.messages import CacheUpdate, PageCopies

SECRET = bytes(range(16))
NO_ROWS = np.zeros(0, dtype=np.int32)


def make_config(
    num_slabs: int,
    groups: Sequence[tuple],
    max_model_len: int = 64,
    block_size: int = 4,
    num_lookahead_tokens: int = 0,
    **fields,
) -> KVCacheConfig:
    """Return a plan without layers; each group is its retention, its pages per slab and perhaps its block size."""

    def group(kept: Retention, k: int, size: int = block_size) -> KVCacheGroupSpec:
        return KVCacheGroupSpec(kept, size, (), (1 << 10) // k, (1 << 10) // k, k)

    return KVCacheConfig(
        num_slabs=num_slabs,
        slab_bytes=1 << 10,
        groups=tuple(group(*each) for each in groups),
        max_model_len=max_model_len,
        num_lookahead_tokens=num_lookahead_tokens,
        **fields,
    )


class Memory:
    """The pages of one or more stage classes, with what is written in them."""

    def __init__(self, configs: Sequence[KVCacheConfig]):
        self.groups = [(config.stage_class, group) for config in configs for group in config.groups]
        self.pages: list[dict[int, dict[int, tuple]]] = [{} for _ in self.groups]
        self.null_ids = [config.null_block_id(g) for config in configs for g in range(len(config.groups))]

    def write(self, group: int, page: int, slot: int, content: tuple) -> None:
        """Write one slot; what other groups had in the same bytes is gone."""
        assert 0 <= page < self.null_ids[group], "a write outside the pool"
        self._overlay(group, page)
        self.pages[group].setdefault(page, {})[slot] = content

    def copy(self, copies: PageCopies) -> None:
        """Copy pages at once, after reading all of them."""
        sources, destinations = copies.sources.tolist(), copies.destinations.tolist()
        assert len(set(destinations)) == len(destinations), "a page is written twice"
        assert not {*sources} & {*destinations}, "a page is both source and destination"
        contents = [dict(self.pages[copies.group].get(page, {})) for page in sources]
        for page, content in zip(destinations, contents, strict=True):
            self._overlay(copies.group, page)
            self.pages[copies.group][page] = content

    def _overlay(self, group: int, page: int) -> None:
        stage_class, spec = self.groups[group]
        slab = page // spec.pages_per_slab
        for other, (other_class, other_spec) in enumerate(self.groups):
            if other != group and other_class == stage_class:
                k = other_spec.pages_per_slab
                for gone in range(slab * k, (slab + 1) * k):
                    self.pages[other].pop(gone, None)


class Work(NamedTuple):
    """What one row does in a step: `count` of its tokens from `start` on, of which `accepted` turn out right."""

    row: int
    start: int
    count: int
    accepted: int
    tokens: tuple[int, ...]


class KVDriver:
    """Runs requests to any length, preempting the newest when the pool is full."""

    def __init__(self, configs, max_num_seqs: int = 4, check: bool = True, **options):
        self.configs = [configs] if isinstance(configs, KVCacheConfig) else configs
        self.config = self.configs[0]
        self.manager = KVCacheManager(configs, max_num_seqs=max_num_seqs, **{"secret": SECRET} | options)
        self.check = check
        self.groups = self.manager.groups
        self.memory = Memory(self.configs)
        longest, lookahead = self.config.max_model_len, self.config.num_lookahead_tokens
        self.tables = [  # as the workers know them
            np.full((max_num_seqs, group.retention.table_width(longest, group.block_size, lookahead)), null_id)
            for group, null_id in zip(self.groups, self.memory.null_ids, strict=True)
        ]
        self.rows: dict[int, list[int]] = {}  # row -> known tokens, oldest row first
        self.num_cached: dict[int, int] = {}
        self.salts: dict[int, str] = {}

    def add(self, tokens: Sequence[int], num_prompt: int | None = None, **options) -> int | None:
        """Admit a request if it fits, with `KVCacheManager.admit`'s options; return its row."""
        token_ids = np.array(tokens, dtype=np.int32)
        before = self.manager.stats()
        admissible = self.manager.can_admit(token_ids, **options)
        self.manager.lookup(token_ids, options.get("salt", ""))
        assert self.manager.stats() == before, "a question changed something"
        admitted = self.manager.admit(token_ids, num_prompt_tokens=num_prompt or len(tokens), **options)
        assert (admitted is not None) == admissible, "can_admit and admit disagree"
        if admitted is None:
            return None
        row, cached = admitted
        assert cached < len(tokens), "no token left to compute"
        assert row not in self.rows, "two requests in one row"
        self.rows[row], self.num_cached[row] = list(tokens), cached
        self.salts[row] = options.get("salt", "")
        for table, null_id in zip(self.tables, self.memory.null_ids, strict=True):
            table[row] = null_id
        self._verify()
        return row

    def step(self, chunk: int = 1 << 30, sample: Callable[[int], int] = lambda row: 0) -> list[list[int]]:
        """Compute up to `chunk` tokens of every row; return the known tokens of the requests that were preempted."""
        preempted: list[list[int]] = []
        scheduled: dict[int, int] = {}
        for row in list(self.rows):
            while row in self.rows and row not in scheduled:
                left = len(self.rows[row]) - int(self.manager.num_computed_tokens[row])
                count = self.manager.max_new_tokens(row, min(chunk, left))
                if count:
                    assert self.reserve([row], [count]) == 1, "less than max_new_tokens said"
                    scheduled[row] = count
                else:
                    newest = list(self.rows)[-1]
                    assert len(self.rows) > 1, "a request that runs alone is not served"
                    assert newest not in scheduled
                    preempted.append(self.rows[newest])
                    self.free(newest)
        rows = np.array(list(scheduled), dtype=np.int64)
        counts = np.array(list(scheduled.values()), dtype=np.int64)
        self.manager.publish(rows, self.manager.num_computed_tokens[rows] + counts)
        self._verify()
        self.compute(rows, counts, sample)
        return preempted

    def reserve(self, rows: Sequence[int], counts: Sequence[int]) -> int:
        """Reserve as the scheduler does."""
        return self.manager.reserve(np.array(rows), np.array(counts))

    def compute(
        self,
        rows: np.ndarray,
        counts: np.ndarray,
        sample: Callable[[int], int] = lambda row: 0,
        accepted: Mapping[int, int] | None = None,
        drafts: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """Do a step's work in the toy memory, then take in its result.

        Args:
            rows: int64 [n].
            counts: int64 [n]; scheduled tokens, drafts not counted.
            sample: the token that a row samples.
            accepted: row -> tokens, drafts counted, that are computed afterwards; all of them by default. What the
                others left in the cache is wrong, except for the state that a row goes on from.
            drafts: row -> guesses that are computed behind its known tokens; accepted ones become known.
        """
        accepted, drafts = accepted or {}, drafts or {}
        starts = self.manager.num_computed_tokens[rows].tolist()
        work = []
        for row, start, scheduled in zip(rows.tolist(), starts, counts.tolist(), strict=True):
            guesses = drafts.get(row, ())
            count = scheduled + len(guesses)
            work.append(Work(row, start, count, accepted.get(row, count), (*self.rows[row], *guesses)))
        update = self.manager.take_cache_update(rows)
        self._apply(update)
        for group in range(len(self.groups)):
            self._write(group, work, update)
        for each in work:
            self._read(each)
        self._take_in(work, sample, drafted=bool(drafts))
        self._verify()

    def _take_in(self, work: list[Work], sample: Callable[[int], int], drafted: bool) -> None:
        done = [each for each in work if each.start + each.accepted >= len(self.rows[each.row])]
        new = [[*each.tokens[len(self.rows[each.row]) : each.start + each.accepted], sample(each.row)] for each in done]
        rows = np.array([each.row for each in work], dtype=np.int64)
        counts = np.array([each.accepted for each in work], dtype=np.int64)
        sampled = np.array([each.row for each in done], dtype=np.int64)
        if drafted:
            self.manager.advance(rows, counts)
            for each, tokens in zip(done, new, strict=True):
                for token in tokens:
                    self.manager.commit(np.array([each.row]), np.array([token]))
        else:
            self.manager.update(rows, counts, sampled, np.array([tokens[0] for tokens in new], dtype=np.int64))
        for each, tokens in zip(done, new, strict=True):
            self.rows[each.row] += tokens

    def free(self, row: int) -> None:
        """Finish, abort or preempt."""
        self.manager.free(row)
        del self.rows[row]
        self._verify()

    def run(self, tokens: Sequence[int], num_new: int = 1, chunk: int = 1 << 30, **options) -> int:
        """Run one request alone to its end; return its cached tokens."""
        row = self.add(tokens, **options)
        assert row is not None, "not admitted"
        while len(self.rows[row]) < len(tokens) + num_new:
            assert not self.step(chunk)
        self.free(row)
        return self.num_cached[row]

    def _apply(self, update: CacheUpdate) -> None:
        for copies in (*update.moves, *update.copies):
            self.memory.copy(copies)
        for table, changes in zip(self.tables, update.tables, strict=True):
            cells = list(zip(changes.rows.tolist(), changes.columns.tolist(), strict=True))
            assert len(set(cells)) == len(cells), "an entry is told twice"
            table[changes.rows, changes.columns] = changes.block_ids

    def _write(self, group: int, work: list[Work], update: CacheUpdate) -> None:
        spec = self.groups[group]
        if spec.retention.holds_state:
            self._write_states(group, work, update)
            return
        for each in work:
            if spec.retention.prefix_cacheable:
                for position in range(each.start, each.start + each.count):
                    self.memory.write(group, *self._slot(group, each.row, position), each.tokens[: position + 1])
            elif each.start == 0:
                for column in range(int(spec.retention.live_range(0, 1, spec.block_size)[1])):
                    page = int(self.tables[group][each.row, column])
                    self.memory.write(group, page, 0, ("encoder", each.row, column))

    def _write_states(self, group: int, work: list[Work], update: CacheUpdate) -> None:
        states = update.states[group]
        null_id, pages = self.memory.null_ids[group], self.memory.pages[group]
        cuts: dict[int, list[tuple[int, int]]] = {}
        for index, offset, page in zip(states.cut_rows, states.cut_tokens, states.cut_pages, strict=True):
            cuts.setdefault(int(index), []).append((int(offset), int(page)))
        found = [pages.get(int(page), {}).get(0) for page in states.state_in]
        for index, each in enumerate(work):
            if states.state_in[index] == null_id:
                assert each.start == 0, "a row in progress starts from zero"
            else:
                assert found[index] == each.tokens[: each.start], f"row {each.row} starts from a wrong state"
            # a runner knows what it accepted before it writes the state to go on from; its cuts lie where they lie
            self.memory.write(group, int(states.state_out[index]), 0, each.tokens[: each.start + each.accepted])
            for offset, page in cuts.get(index, []):
                assert 1 <= offset <= each.count
                self.memory.write(group, page, 0, each.tokens[: each.start + offset])

    def _slot(self, group: int, row: int, position: int) -> tuple[int, int]:
        size = self.groups[group].block_size
        page = int(self.tables[group][row, position // size])
        assert page != self.memory.null_ids[group], "a token has no page"
        return page, position % size

    def _read(self, work: Work) -> None:
        row = work.row
        for group, spec in enumerate(self.groups):
            kept = spec.retention
            if kept.holds_state:
                continue
            if not kept.prefix_cacheable:
                for column in range(int(kept.live_range(0, 1, spec.block_size)[1])):
                    page = int(self.tables[group][row, column])
                    assert self.memory.pages[group][page][0] == ("encoder", row, column), "an encoder's page is gone"
                continue
            for position in range(int(kept.live_range(work.start, 1, 1)[0]), work.start + work.count):
                page, slot = self._slot(group, row, position)
                held = self.memory.pages[group].get(page, {}).get(slot)
                assert held == work.tokens[: position + 1], f"row {row} reads wrong tokens in group {group}"

    def _verify(self) -> None:
        if self.check:
            self.manager.check()


def num_keys(manager: KVCacheManager) -> int:
    """Count what can be found: keys of units and of tails."""
    index = manager._state.prefix_index
    return len(index.free) - int(index.counts[0])


def listed_pages(manager: KVCacheManager, tokens: Sequence[int], salt: str = "") -> np.ndarray:
    """Return the pages listed under each full unit of a prompt, int [units, num_groups]; 0 is none."""
    keys = manager._hasher.chain(manager._hasher.root(salt), np.array(tokens, dtype=np.int32))
    index = manager._state.prefix_index
    entry_of = {tuple(index.keys[entry].tolist()): entry for entry in index.slots[index.slots > 0].tolist()}
    return index.pages[[entry_of.get(tuple(key), 0) for key in keys.tolist()]]


def evict_page(manager: KVCacheManager, group: int, page: int) -> None:
    """Evict a cached page, as the pool does when it needs room."""
    call_evict(manager._pool._record, group, page)
    bring_up_to_date(manager._record)
    manager.check()
