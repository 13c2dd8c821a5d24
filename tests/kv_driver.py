"""Drive a real `KVCacheManager` with a toy scheduler and a memory that tells when a page holds the wrong tokens.

The model of the cache is `memory[group][page][slot] = the tokens up to and including the one written there`. A step
writes its tokens, then every row reads all that its next token may attend to, and compares with its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from girih.kv.config import KVCacheConfig, KVCacheGroupSpec
from girih.kv.manager import KVCacheManager
from girih.kv.retention import Retention

SECRET = bytes(range(16))
NO_ROWS = np.zeros(0, dtype=np.int32)


def make_config(
    num_slabs: int, groups: Sequence[tuple[Retention, int]], max_model_len: int = 64, block_size: int = 4
) -> KVCacheConfig:
    """Return a plan without layers; each group is its retention and its pages per slab."""
    return KVCacheConfig(
        num_slabs=num_slabs,
        slab_bytes=1 << 10,
        groups=tuple(KVCacheGroupSpec(kept, block_size, (), 1, (1 << 10) // k, k) for kept, k in groups),
        max_model_len=max_model_len,
    )


class KVDriver:
    """Runs requests to any length, preempting the newest when the pool is full."""

    def __init__(self, config: KVCacheConfig, max_num_seqs: int = 4, check: bool = True, **options):
        self.config = config
        self.manager = KVCacheManager(config, max_num_seqs=max_num_seqs, **{"secret": SECRET} | options)
        self.check = check
        self.block_size = self.manager.block_size
        self.memory: list[dict[tuple[int, int], tuple[int, ...]]] = [{} for _ in config.groups]
        self.tables = [np.full_like(table, -1) for table in self.manager._tables.tables]
        self.rows: dict[int, list[int]] = {}  # row -> known tokens, oldest row first
        self.num_prompt: dict[int, int] = {}
        self.num_cached: dict[int, int] = {}
        self._compact: int | None = None  # the row that has been alone since it started, in an empty pool
        self._apply_table_updates(first=True)

    def add(self, tokens: Sequence[int], num_prompt: int | None = None, **options) -> int | None:
        """Admit a request if it fits; return its row."""
        token_ids = np.array(tokens, dtype=np.int32)
        before = self.manager.stats()
        empty = before.num_free_slabs == self.config.num_slabs
        admissible = self.manager.can_admit(token_ids, **options)
        self.manager.lookup(token_ids, options.get("salt", ""))
        assert self.manager.stats() == before, "a question changed something"
        if not admissible:
            return None
        num_prompt = len(tokens) if num_prompt is None else num_prompt
        row, cached = self.manager.admit(token_ids, num_prompt_tokens=num_prompt, **options)
        assert cached < len(tokens), "no token left to compute"
        assert row not in self.rows, "two requests in one row"
        self.rows[row], self.num_prompt[row], self.num_cached[row] = list(tokens), num_prompt, cached
        self._compact = row if len(self.rows) == 1 and empty else None
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
                    assert newest != self._compact, "a request that has run alone from an empty pool is not served"
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

    def compute(self, rows: np.ndarray, counts: np.ndarray, sample: Callable[[int], int] = lambda row: 0) -> None:
        """Do a step's work in the toy memory, then advance and commit."""
        self._apply_table_updates()
        before = self.manager.num_computed_tokens[rows].tolist()
        work = list(zip(rows.tolist(), before, counts.tolist(), strict=True))
        for row, start, count in work:
            for position in range(start, start + count):
                for group, memory in enumerate(self.memory):
                    memory[self._slot(group, row, position)] = tuple(self.rows[row][: position + 1])
        for row, start, count in work:
            self._read(row, start, count)
        self.manager.advance(rows, counts)
        self._verify()
        done = [row for row, start, count in work if start + count == len(self.rows[row])]
        tokens = [sample(row) for row in done]
        self.manager.commit(np.array(done, dtype=np.int64), np.array(tokens, dtype=np.int64))
        for row, token in zip(done, tokens, strict=True):
            self.rows[row].append(token)
        self._verify()

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

    def _slot(self, group: int, row: int, position: int) -> tuple[int, int]:
        page = int(self.tables[group][row, position // self.block_size])
        assert page != self.config.null_block_id(group), "a token has no page"
        return page, position % self.block_size

    def _read(self, row: int, start: int, count: int) -> None:
        for group, spec in enumerate(self.config.groups):
            first, _ = spec.retention.live_range(start, count, self.block_size)
            for position in range(int(first) * self.block_size, start + count):
                held = self.memory[group].get(self._slot(group, row, position))
                assert held == tuple(self.rows[row][: position + 1]), f"row {row} reads wrong tokens in group {group}"

    def _apply_table_updates(self, first: bool = False) -> None:
        for group, update in enumerate(self.manager.take_cache_update(NO_ROWS, NO_ROWS).tables):
            if first:
                self.tables[group][:] = self.config.null_block_id(group)
            self.tables[group][update.rows, update.columns] = update.block_ids
            assert np.array_equal(self.tables[group], self.manager._tables.tables[group]), "an update is missing"

    def _verify(self) -> None:
        if self.check:
            self.manager.check()
