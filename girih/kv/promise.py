"""How a sequence that runs alone is kept from spreading over slabs that its other groups will need.

Pages cannot move, so a slab with one page in use is as good as full for every other group. While several requests
run, the scheduler can preempt one; a lone request must get by with what start-up counted, which is
`capacity.slabs_needed` of its peak. So a pool with one row held promises slabs to every group:

    promised   the slabs of each group's peak at max_model_len. While they leave none to spare, a group evicts
               cached pages of its own busy slabs rather than taking another slab.
    floor      for a chunk of several blocks: the slabs of the peaks up to the length at which the pages that this
               chunk puts into windows are gone again. A chunk that ends within its block needs no floor: it holds
               no more than its peak.

From an empty pool both hold from the first step to the last, so that a lone request reaches max_model_len.
"""

from __future__ import annotations

import numpy as np

from girih.kv.capacity import peak_pages
from girih.kv.config import KVCacheConfig


class SlabPromise:
    """The floors of one plan, as `BlockPool.allocate` takes them.

    Args:
        config: the plan.
        block_size: of all groups.
    """

    def __init__(self, config: KVCacheConfig, block_size: int):
        self._config, self._block_size = config, block_size
        self._per_slab = np.array([group.pages_per_slab for group in config.groups], dtype=np.int64)
        self._nothing = np.zeros(len(config.groups), dtype=np.int64)
        self._promised = self._slabs_at_peak(config.max_model_len)
        self._drain_tokens = self._tokens_until_drained()

    def floors(self, num_running: int, num_computed_tokens: int, num_new_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (floor, promised), int64 [num_groups] each; zeros unless one row runs alone.

        Args:
            num_running: rows held.
            num_computed_tokens: of the row.
            num_new_tokens: the chunk it wants.
        """
        if num_running != 1:
            return self._nothing, self._nothing
        if num_new_tokens <= self._block_size - num_computed_tokens % self._block_size:
            return self._nothing, self._promised
        return self._slabs_at_peak(num_computed_tokens + num_new_tokens + self._drain_tokens), self._promised

    def _slabs_at_peak(self, num_tokens: int) -> np.ndarray:
        limit = self._config.max_model_len
        pages = peak_pages(self._config.groups, min(num_tokens, limit), self._config.num_lookahead_tokens)
        return -(-np.array(pages, dtype=np.int64) // self._per_slab)

    def _tokens_until_drained(self) -> int:
        # for groups that forget: twice the tokens that they keep, since slabs run empty one after the other
        limit = self._config.max_model_len
        pages = peak_pages(self._config.groups, limit, self._config.num_lookahead_tokens)
        kept = [count for count in pages if count * self._block_size < limit]
        return 2 * self._block_size * max(kept, default=0)
