"""Drive a real `Worker` step by step without scheduler and manager: the smallest thing that hands out pages.

Pages come in random order from slabs dealt to the groups in turn. With `poison` the whole pool is NaN at the start,
and every page is NaN again when it is freed. A row of a group of recurrent layers has a page of its own for its state;
`cuts` of a step keep copies of it, `checkpoints`, from which another row can start. `move` lets pages change place.
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
from girih.messages import CacheUpdate, NewRow, PageCopies, StateStep, StepInput, StepOutput, TableUpdate
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
                    _poison(tensor)
        self.rng = random.Random(seed)
        self.free_pages = _deal_pages(self.config, self.rng)
        self.attention_groups = [g for g, group in enumerate(self.config.groups) if not group.retention.holds_state]
        self.state_groups = [g for g in range(len(self.config.groups)) if g not in self.attention_groups]
        self.tables: dict[tuple[int, int], dict[int, int]] = {}  # (group, row) -> column -> page
        self.states: dict[tuple[int, int], int] = {}  # (group, row) -> the page that the row's state is in
        self.next_states: dict[tuple[int, int], int] = {}  # (group, row) -> where it goes instead, if it is shared
        self.checkpoints: dict[tuple[int, int, int], int] = {}  # (group, row, number of tokens) -> page
        self.num_computed: dict[int, int] = {}
        self.num_known: dict[int, int] = {}
        self.outputs: list[StepOutput] = []
        self._new_rows: list[NewRow] = []
        self._entries: list[list[tuple[int, int, int]]] = [[] for _ in self.config.groups]
        self._moves: list[PageCopies] = []
        self._copies: list[PageCopies] = []
        self._freed: list[tuple[int, int]] = []

    def add(self, row: int, token_ids: Sequence[int], params: SamplingParams = GREEDY, num_prompt: int | None = None,
            share_from: int | None = None, num_shared: int = 0) -> None:  # fmt: skip
        """Put a sequence in a row; its first `num_shared` tokens use the pages and the checkpoint of row `share_from`.

        Of a block that is shared in part, the row gets a copy of its own.
        """
        self.num_computed[row] = num_shared
        self.num_known[row] = len(token_ids)
        num_prompt = len(token_ids) if num_prompt is None else num_prompt
        self._new_rows.append(NewRow(row, f"r{row}", np.array(token_ids, np.int32), num_prompt, params))
        for g in self.attention_groups:
            pages = self.tables.get((g, share_from), {})
            last, rest = divmod(num_shared, self.config.groups[g].block_size)
            self.tables[g, row] = {c: page for c, page in pages.items() if c < last}
            if rest:
                self.tables[g, row][last] = self.free_pages[g].pop()
                self._copies.append(self._page_copies(g, [pages[last]], [self.tables[g, row][last]]))
            self._entries[g] += [(row, column, page) for column, page in self.tables[g, row].items()]
        for g in self.state_groups:
            page = self.free_pages[g].pop()
            if num_shared:
                self.states[g, row], self.next_states[g, row] = self.checkpoints[g, share_from, num_shared], page
            else:
                self.states[g, row] = page

    def drop(self, row: int) -> None:
        """Free the pages of a row; its checkpoints stay."""
        for g in self.attention_groups:
            for page in self.tables.pop((g, row)).values():
                self._free(g, page)
        for g in self.state_groups:
            state = self.states.pop((g, row))
            self._free(g, self.next_states.pop((g, row), state))

    def reserve(self, row: int, num_new: int) -> None:
        """Give the row the pages that computing `num_new` tokens needs, and free those that it needs no more."""
        for g in self.attention_groups:
            group, table = self.config.groups[g], self.tables[g, row]
            first, last = group.retention.live_range(self.num_computed[row], num_new, group.block_size)
            for column in [c for c in table if c < first]:
                self._free(g, table.pop(column))
                self._entries[g].append((row, column, self.config.null_block_id(g)))
            for column in range(first, last):
                if column not in table:
                    table[column] = self.free_pages[g].pop()
                    self._entries[g].append((row, column, table[column]))

    def move(self, group: int, num_pages: int) -> None:
        """Let pages that are in use change place before the next step, in two lists: the second may use the first's."""
        for _ in range(2):
            pages = self._pages_in_use(group)
            sources = self.rng.sample(pages, min(num_pages, len(pages), len(self.free_pages[group])))
            destinations = [self.free_pages[group].pop() for _ in sources]
            self._moves.append(self._page_copies(group, sources, destinations))
            to = dict(zip(sources, destinations, strict=True))
            for (g, row), table in self.tables.items():
                for column, page in table.items():
                    if g == group and page in to:
                        table[column] = to[page]
                        self._entries[g].append((row, column, to[page]))
            for places in (self.states, self.next_states, self.checkpoints):
                places.update({key: to[page] for key, page in places.items() if key[0] == group and page in to})
            self.free_pages[group] += sources

    def step(self, work: dict[int, int], cuts: dict[int, list[int]] | None = None) -> StepOutput:
        """Compute work[row] new tokens of each row; keep its state after each of cuts[row] of these tokens."""
        for row, num_new in work.items():
            self.reserve(row, num_new)
        first, no_update = self.config.first_group, TableUpdate(*np.zeros((3, 0), np.int32))
        updates = [TableUpdate(*np.array(entries, np.int32).reshape(-1, 3).T) for entries in self._entries]
        states = {first + g: self._state_step(g, list(work), cuts or {}) for g in self.state_groups}
        output = self.worker.execute_model(
            StepInput(
                step_id=len(self.outputs),
                new_rows=tuple(self._new_rows),
                cache=CacheUpdate(
                    tuple(self._moves), tuple(self._copies), (no_update,) * first + tuple(updates), states
                ),
                rows=np.array(list(work), np.int32),
                num_computed_tokens=np.array([self.num_computed[row] for row in work], np.int32),
                num_scheduled_tokens=np.array(list(work.values()), np.int32),
                samples=np.array([self.num_computed[row] + n == self.num_known[row] for row, n in work.items()]),
            )
        )
        self._new_rows, self._moves, self._copies = [], [], []
        self._entries = [[] for _ in self.config.groups]
        self._poison_freed()
        for row, num_new in work.items():
            self.num_computed[row] += num_new
        for row in output.rows.tolist():
            self.num_known[row] += 1
        self.outputs.append(output)
        return output

    def _state_step(self, g: int, rows: list[int], cuts: dict[int, list[int]]) -> StateStep:
        state_in = [self.states[g, row] if self.num_computed[row] else self.config.null_block_id(g) for row in rows]
        for row in rows:
            self.states[g, row] = self.next_states.pop((g, row), self.states[g, row])
        flat = [(i, tokens, self.free_pages[g].pop()) for i, row in enumerate(rows) for tokens in cuts.get(row, [])]
        for i, tokens, page in flat:
            self.checkpoints[g, rows[i], self.num_computed[rows[i]] + tokens] = page
        state_out = [self.states[g, row] for row in rows]
        return StateStep(
            np.array(state_in, np.int32), np.array(state_out, np.int32), *np.array(flat, np.int32).reshape(-1, 3).T
        )

    def run(self, row: int, num_tokens: int, chunk: int | None = None) -> list[int]:
        """Compute a row alone until it has sampled `num_tokens` tokens; prompts in chunks of at most `chunk`."""
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            rest = self.num_known[row] - self.num_computed[row]
            tokens += self.step({row: min(rest, chunk or rest)}).token_ids.tolist()
        return tokens

    def _page_copies(self, group: int, sources: list[int], destinations: list[int]) -> PageCopies:
        return PageCopies(
            group + self.config.first_group, np.array(sources, np.int32), np.array(destinations, np.int32)
        )

    def _pages_in_use(self, group: int) -> list[int]:
        pages = {page for (g, _), table in self.tables.items() if g == group for page in table.values()}
        for places in (self.states, self.next_states, self.checkpoints):
            pages |= {page for key, page in places.items() if key[0] == group}
        return sorted(pages)

    def _free(self, g: int, page: int) -> None:
        if page in self._pages_in_use(g):
            return
        self.free_pages[g].insert(0, page)
        self._freed.append((g, page))

    def _poison_freed(self) -> None:
        """Overwrite what was freed before the last step and not used again; its moves and copies have read it."""
        for g, page in self._freed if self.poison else ():
            if page not in self._pages_in_use(g):
                for name in self.config.groups[g].layer_names:
                    for tensor in self.caches[name].tensors.values():
                        _poison(tensor[page])
        self._freed = []


def _poison(tensor: torch.Tensor) -> None:
    tensor.fill_(torch.nan if tensor.is_floating_point() else 77)


def _deal_pages(config: KVCacheConfig, rng: random.Random) -> list[list[int]]:
    num_groups = len(config.groups)
    dealt = []
    for g, group in enumerate(config.groups):
        per_slab = group.pages_per_slab
        pages = [slab * per_slab + i for slab in range(g, config.num_slabs, num_groups) for i in range(per_slab)]
        rng.shuffle(pages)
        dealt.append(pages)
    return dealt
