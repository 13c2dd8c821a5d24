"""Drive a real `Worker` step by step without scheduler and manager: the smallest thing that hands out pages.

Pages come in random order from slabs dealt to the groups in turn. With `poison` the whole pool is NaN at the start,
and every page is NaN again when it is freed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from girih.config import EngineConfig
from girih.kv.config import KVCacheConfig
from girih.kv.plan import get_kv_cache_configs
from girih.messages import CacheUpdate, NewRow, StepInput, StepOutput, TableUpdate
from girih.request import SamplingParams
from girih.worker.worker import Worker

GREEDY = SamplingParams(temperature=0, seed=0)


def make_worker(directory: Path, **options) -> Worker:
    """Return a worker with its model loaded."""
    worker = Worker(EngineConfig(model=str(directory), **{"dtype": "float32", "max_num_seqs": 8} | options), rank=0)
    worker.load_model()
    return worker


class StepDriver:
    """Hands out rows and pages, and remembers every step's output."""

    def __init__(
        self,
        worker: Worker,
        *,
        config: KVCacheConfig | None = None,
        block_size: int = 16,
        max_model_len: int = 256,
        pool_bytes: int = 4 << 20,
        poison: bool = False,
        seed: int = 0,
    ):
        if config is None:
            (config,) = get_kv_cache_configs(
                [worker.get_kv_cache_spec()], [pool_bytes], max_model_len=max_model_len, block_size=block_size
            )
        self.config = config
        self.worker = worker
        self.num_bound = worker.initialize_from_config(self.config)
        self.poison = poison
        self.caches = worker.runner.context.kv_caches
        if poison:
            for cache in self.caches.values():
                for tensor in cache.tensors.values():
                    tensor.fill_(torch.nan)
        self.free_pages = _deal_pages(self.config, random.Random(seed))
        self.tables: dict[tuple[int, int], dict[int, int]] = {}  # (group, row) -> column -> page
        self.num_computed: dict[int, int] = {}
        self.num_known: dict[int, int] = {}
        self.outputs: list[StepOutput] = []
        self._new_rows: list[NewRow] = []
        self._entries: list[list[tuple[int, int, int]]] = [[] for _ in self.config.groups]

    def add(self, row: int, token_ids: Sequence[int], params: SamplingParams = GREEDY, num_prompt: int | None = None,
            share_from: int | None = None, num_shared: int = 0) -> None:  # fmt: skip
        """Put a sequence in a row; its first `num_shared` tokens (whole blocks) use the pages of row `share_from`."""
        self.num_computed[row] = num_shared
        self.num_known[row] = len(token_ids)
        num_prompt = len(token_ids) if num_prompt is None else num_prompt
        self._new_rows.append(NewRow(row, f"r{row}", np.array(token_ids, np.int32), num_prompt, params))
        for g, group in enumerate(self.config.groups):
            pages = self.tables.get((g, share_from), {})
            self.tables[g, row] = {c: page for c, page in pages.items() if c < num_shared // group.block_size}
            self._entries[g] += [(row, column, page) for column, page in self.tables[g, row].items()]

    def reserve(self, row: int, num_new: int) -> None:
        """Give the row the pages that computing `num_new` tokens needs, and free those that it needs no more."""
        for g, group in enumerate(self.config.groups):
            table = self.tables[g, row]
            first, last = group.retention.live_range(self.num_computed[row], num_new, group.block_size)
            for column in [c for c in table if c < first]:
                self._free(g, table.pop(column))
                self._entries[g].append((row, column, self.config.null_block_id(g)))
            for column in range(first, last):
                if column not in table:
                    table[column] = self.free_pages[g].pop()
                    self._entries[g].append((row, column, table[column]))

    def step(self, work: dict[int, int]) -> StepOutput:
        """Compute work[row] new tokens of each row."""
        for row, num_new in work.items():
            self.reserve(row, num_new)
        updates = [TableUpdate(*np.array(entries, np.int32).reshape(-1, 3).T) for entries in self._entries]
        output = self.worker.execute_model(
            StepInput(
                step_id=len(self.outputs),
                new_rows=tuple(self._new_rows),
                cache=CacheUpdate((), (), tuple(updates), {}),
                rows=np.array(list(work), np.int32),
                num_computed_tokens=np.array([self.num_computed[row] for row in work], np.int32),
                num_scheduled_tokens=np.array(list(work.values()), np.int32),
                samples=np.array([self.num_computed[row] + n == self.num_known[row] for row, n in work.items()]),
            )
        )
        self._new_rows, self._entries = [], [[] for _ in self.config.groups]
        for row, num_new in work.items():
            self.num_computed[row] += num_new
        for row in output.rows.tolist():
            self.num_known[row] += 1
        self.outputs.append(output)
        return output

    def run(self, row: int, num_tokens: int, chunk: int | None = None) -> list[int]:
        """Compute a row alone until it has sampled `num_tokens` tokens; prompts in chunks of at most `chunk`."""
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            rest = self.num_known[row] - self.num_computed[row]
            tokens += self.step({row: min(rest, chunk or rest)}).token_ids.tolist()
        return tokens

    def _free(self, g: int, page: int) -> None:
        if any(page in table.values() for (other, _), table in self.tables.items() if other == g):
            return
        self.free_pages[g].insert(0, page)
        if self.poison:
            for name in self.config.groups[g].layer_names:
                for tensor in self.caches[name].tensors.values():
                    tensor[page] = torch.nan


def _deal_pages(config: KVCacheConfig, rng: random.Random) -> list[list[int]]:
    num_groups = len(config.groups)
    dealt = []
    for g, group in enumerate(config.groups):
        per_slab = group.pages_per_slab
        pages = [slab * per_slab + i for slab in range(g, config.num_slabs, num_groups) for i in range(per_slab)]
        rng.shuffle(pages)
        dealt.append(pages)
    return dealt
