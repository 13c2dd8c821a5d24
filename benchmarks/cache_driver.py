"""Drives the real `KVCacheManager` in batches, as the engine does, without any memory behind the pages.

Sampled tokens are a function of the request's number and the position, so that nothing need be remembered of a
request but its length.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from pools import held_bytes

from girih.kv import KVCacheConfig, KVCacheManager

VOCAB_SIZE = 128_256
CHUNK_TOKENS = 8192
"""Prompt tokens computed in one step."""


def tokens_of(serial: np.ndarray | int, position: np.ndarray) -> np.ndarray:
    """Return the token ids that request number `serial` has at these positions, int32 [n] (splitmix64 of both)."""
    with np.errstate(over="ignore"):
        mixed = (np.asarray(serial, dtype=np.uint64) << np.uint64(24)) + position.astype(np.uint64)
        mixed = (mixed + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((mixed >> np.uint64(33)) % np.uint64(VOCAB_SIZE)).astype(np.int32)


class CacheDriver:
    """Rows of a manager, each with the number and the lengths of its request.

    Args:
        config: the plan.
        max_num_seqs: rows.
        max_model_len: longest request here, at most the plan's; a shorter one makes narrower block tables.
    """

    def __init__(self, config: KVCacheConfig, max_num_seqs: int, max_model_len: int):
        self.config = replace(config, max_model_len=max_model_len)
        self.manager = KVCacheManager(self.config, max_num_seqs=max_num_seqs)
        self._order = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_running = 0
        self.serial = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_known = np.zeros(max_num_seqs, dtype=np.int64)
        """Tokens of each row's request so far, computed or not."""
        self.moved_bytes = 0
        """Bytes that steps have copied within the pool."""

    @property
    def rows(self) -> np.ndarray:
        """Return the rows that run, the oldest request first, int64 [n]; a view that the next change overwrites."""
        return self._order[: self._num_running]

    def admit(self, serial: int, num_known: int, num_prompt: int) -> int | None:
        """Let a request of `num_known` tokens run if it fits; return its row."""
        token_ids = tokens_of(serial, np.arange(num_known))
        admitted = self.manager.admit(token_ids, num_prompt_tokens=num_prompt)
        if admitted is None:
            return None
        row, _ = admitted
        self._order[self._num_running] = row
        self._num_running += 1
        self.serial[row], self.num_known[row] = serial, num_known
        return row

    def free(self, rows: np.ndarray) -> None:
        """Finish or preempt rows."""
        for row in rows.tolist():
            self.manager.free(row)
        rest = self.rows[~np.isin(self.rows, rows)]
        self._num_running = len(rest)
        self._order[: len(rest)] = rest

    def num_computed(self, rows: np.ndarray) -> np.ndarray:
        """Return the computed tokens of rows, int64 [n]."""
        return self.manager.num_computed_tokens[rows].astype(np.int64)

    def reserve(self, rows: np.ndarray, counts: np.ndarray) -> int:
        """Reserve and publish the next tokens of rows in order; return how many rows were served."""
        served = self.manager.reserve(rows, counts)
        self.manager.publish(rows[:served], (self.num_computed(rows) + counts)[:served])
        return served

    def compute(self, rows: np.ndarray, counts: np.ndarray) -> None:
        """Hand out a step of reserved tokens and take in its result; rows without unknown tokens left sample one."""
        update = self.manager.take_cache_update(rows)
        for move in update.moves:
            self.moved_bytes += len(move.sources) * self.config.groups[move.group].page_stride_bytes
        sampled = rows[self.num_computed(rows) + counts == self.num_known[rows]]
        tokens = tokens_of(self.serial[sampled], self.num_known[sampled])
        self.manager.update(rows, counts, sampled, tokens)
        self.num_known[sampled] += 1

    def prefill(self, row: int) -> bool:
        """Compute the known tokens of a row, in chunks; tell whether there was room."""
        rows = np.array([row])
        while (left := int(self.num_known[row] - self.num_computed(rows)[0])) > 0:
            chunk = self.manager.max_new_tokens(row, min(left, CHUNK_TOKENS))
            if chunk == 0 or self.reserve(rows, np.array([chunk])) == 0:
                return False
            self.compute(rows, np.array([chunk]))
            if chunk == left:
                break
        return True

    def pages_referenced(self) -> np.ndarray:
        """Return the pages that rows reference, int64 [groups]."""
        return np.array(self.manager.stats().referenced_pages, dtype=np.int64)

    def held_bytes(self) -> int:
        """Return the bytes of referenced pages and of the unused part of slabs that groups have borrowed."""
        return held_bytes(self.manager)
