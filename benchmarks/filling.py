"""Fill a pool with decoding requests until the manager refuses, and say what an ideal one would hold."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from cache_driver import CacheDriver
from families import Family

from girih.kv import KVCacheConfig
from girih.kv.capacity import largest

DECODE_STEPS = 16
"""Steps that a request decodes before it has its length, so that it has crossed a block boundary."""

BATCH = 256
"""Requests that are admitted before they decode together."""


def fill(family: Family, config: KVCacheConfig, lengths: Sequence[int]) -> tuple[CacheDriver, np.ndarray]:
    """Admit requests and decode each to its length until one is refused; the last step's pages stay reserved.

    Args:
        family: the model.
        config: its plan.
        lengths: of the requests in tokens, repeated as often as needed; above DECODE_STEPS.

    Returns:
        (the driver with its rows, int64 [n] lengths of the requests that run).
    """
    most = int(config.pool_bytes // min(family.ideal_bytes(length) for length in set(lengths))) + 2
    driver = CacheDriver(config, most, min(config.max_model_len, max(lengths) + DECODE_STEPS))
    length_of = np.zeros(most, dtype=np.int64)
    source = itertools.cycle(lengths)
    full = False
    while not full:
        newest: list[int] = []
        for length in itertools.islice(source, BATCH):
            serial = len(driver.rows)
            row = driver.admit(serial, length - DECODE_STEPS, length - DECODE_STEPS)
            if row is None:
                full = True
                break
            length_of[row] = length
            newest.append(row)
            if not driver.prefill(row):
                driver.free(np.array([row]))
                newest.pop()
                full = True
                break
        full |= not _decode(driver, np.array(newest, dtype=np.int64))
    return driver, length_of[driver.rows]


def _decode(driver: CacheDriver, rows: np.ndarray) -> bool:
    """Decode rows until the step of their last token is reserved; who finds no page is freed, the newest first."""
    all_served = True
    for step in range(DECODE_STEPS):
        while driver.reserve(rows, np.ones_like(rows)) < len(rows):
            all_served = False
            driver.free(rows[-1:])
            rows = rows[:-1]
        if step < DECODE_STEPS - 1 and len(rows):
            driver.compute(rows, np.ones_like(rows))
    return all_served


def usable(family: Family, driver: CacheDriver, lengths: np.ndarray) -> float:
    """Return live / held bytes of rows that are at these lengths, in the step that computes their last token."""
    return float(family.live_bytes(lengths - 1).sum() / driver.held_bytes())


def ideal_requests(family: Family, pool_bytes: int, lengths: Sequence[int]) -> int:
    """Count the requests of this sequence that fit if each takes exact bytes in 16-token blocks."""
    sizes = [family.ideal_bytes(length) for length in lengths]
    cycles = int(pool_bytes // sum(sizes))
    rest = np.cumsum(sizes) <= pool_bytes - cycles * sum(sizes)
    return cycles * len(sizes) + int(rest.sum())


def mean_requests(config: KVCacheConfig, pages: np.ndarray) -> int:
    """Count the requests that fit when each holds this many pages on average.

    Args:
        config: the plan.
        pages: float64 [groups].
    """
    per_slab = np.array([group.pages_per_slab for group in config.groups])
    at_most = int(config.num_slabs / (pages / per_slab).sum())
    return largest(at_most, lambda count: np.ceil(count * pages / per_slab).sum() <= config.num_slabs)


class PagesOfLength:
    """The pages that one request of a length holds in steady decode, found with the manager and remembered.

    Args:
        config: the plan.
        longest: the longest request that is asked for, in tokens.
    """

    def __init__(self, config: KVCacheConfig, longest: int):
        self._driver = CacheDriver(config, 1, min(config.max_model_len, longest + DECODE_STEPS))
        self._known: dict[int, np.ndarray] = {}

    def mean(self, lengths: Sequence[int]) -> np.ndarray:
        """Return the mean pages of requests of these lengths, float64 [groups]."""
        return np.mean([self._of(length) for length in lengths], axis=0)

    def _of(self, length: int) -> np.ndarray:
        if length not in self._known:
            driver = self._driver
            row = driver.admit(length, length - DECODE_STEPS, length - DECODE_STEPS)
            assert row is not None, f"an empty pool does not take one request of {length} tokens"
            fits = driver.prefill(row) and _decode(driver, np.array([row]))
            assert fits, f"a request of {length} tokens that was admitted has no room"
            self._known[length] = driver.pages_referenced()
            driver.free(np.array([row]))
            driver.manager.reset_prefix_cache()
        return self._known[length]
