"""`TokenExchange`: the tokens that one worker samples, appended to the batch of every worker.

A worker that does not sample goes on to the next step while the tokens are on their way, and waits for them when a step
needs one of their rows: so a pipeline stage can compute other rows meanwhile.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from girih.layers.parallel import Broadcast, Ranks
from girih.messages import StepInput
from girih.worker.input_batch import InputBatch


class TokenExchange:
    """The tokens on their way to one worker, or from the one that samples.

    Args:
        ranks: this worker among others.
        batch: gets the tokens.
    """

    def __init__(self, ranks: Ranks, batch: InputBatch):
        self._ranks, self._batch = ranks, batch
        self._pending: deque[tuple[np.ndarray, Broadcast]] = deque()

    def send(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Append tokens here, and let all other workers have them.

        Args:
            rows: int32 [m], those that sample in this step.
            token_ids: int32 [m]; -1 where none could be chosen.
        """
        self._append(rows, token_ids)
        if rows.size and self._ranks.place.world_size > 1:
            self._drop_sent()
            self._pending.append((rows, self._ranks.start_broadcast(torch.from_numpy(token_ids.copy()))))

    def receive(self, rows: np.ndarray) -> None:
        """Expect the tokens of these rows, int32 [m], of this step."""
        if rows.size:
            self._pending.append((rows, self._ranks.start_broadcast(torch.empty(rows.size, dtype=torch.int32))))

    def await_for(self, step: StepInput) -> None:
        """Wait for the tokens of all rows that a step computes or gives to another request."""
        if not self._pending or self._ranks.place.samples:
            return
        needed = np.concatenate((step.rows, [new.row for new in step.new_rows]))
        while any(np.isin(rows, needed).any() for rows, _ in self._pending):
            rows, broadcast = self._pending.popleft()
            self._append(rows, broadcast.wait().numpy())

    def _append(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        self._batch.append(rows[token_ids >= 0], token_ids[token_ids >= 0])

    def _drop_sent(self) -> None:
        """Keep no more than a few broadcasts: the tokens of older ones have long been sent."""
        while len(self._pending) >= 2 * self._ranks.place.num_stages:
            self._pending.popleft()[1].wait()
