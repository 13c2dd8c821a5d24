"""How much of the planned KV cache is in use at run time, in whole slabs, and what goes back to the system.

The plan is the largest size: page ids, block tables and each layer's view stay as they are. A smaller pool just does
not use its last slabs; a CPU gives their memory to whoever needs it, and takes it back when they are used again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from girih.errors import CapacityError
from girih.executor._base import Executor
from girih.kv import capacity
from girih.kv.config import KVCacheConfig
from girih.kv.manager import KVCacheManager
from girih.messages import PageCopies
from girih.units import format_bytes

logger = logging.getLogger(__name__)


class PoolMemory:
    """The pools of all workers.

    Args:
        configs: the plans, by rank.
        manager: the run time of these plans.
        executor: reaches the workers.
    """

    def __init__(self, configs: Sequence[KVCacheConfig], manager: KVCacheManager, executor: Executor):
        self._planned = list(configs)
        self._now = list(configs)  # with the slabs in use
        self._manager = manager
        self._executor = executor
        self.moved_bytes = 0
        """Bytes of pages that steps have moved, on all workers."""

    @property
    def total_bytes(self) -> list[int]:
        """Return the bytes of pool and null page that each worker uses, by rank."""
        return [config.total_bytes for config in self._now]

    def count_moves(self, moves: Iterable[PageCopies]) -> None:
        """Count the bytes that a step moves."""
        for copies in moves:
            for config in self._planned:
                if 0 <= copies.group - config.first_group < len(config.groups):
                    page_bytes = config.groups[copies.group - config.first_group].page_size_bytes
                    self.moved_bytes += len(copies.sources) * page_bytes

    def resize(self, memory_bytes: int, longest_tokens: int) -> int:
        """Let each worker's pool have as many of its planned slabs as fit in so much memory.

        Args:
            memory_bytes: of pool and null page together, on each worker.
            longest_tokens: the most tokens that an unfinished request has, with one to come.

        Returns:
            The longest request in tokens that can be served from now on.

        Raises:
            CapacityError: what the requests in progress hold, or one of them alone, does not fit; nothing has changed.
        """
        most_bytes = max(config.total_bytes + config.slab_bytes for config in self._planned)
        if memory_bytes >= most_bytes > 0:
            logger.warning(
                "the KV cache was planned with %s, which is the most that it can have while this engine runs; %s were "
                "asked for: start with --kv-cache-memory of the most that it should ever have",
                format_bytes(max(config.total_bytes for config in self._planned)), format_bytes(memory_bytes),
            )  # fmt: skip
        resized = self._with_memory(memory_bytes)
        limit = min(_max_request_tokens(config) for config in resized)
        if limit < longest_tokens:
            need_bytes = max(_bytes_of_request(config, longest_tokens) for config in self._planned)
            raise CapacityError(
                f"a KV cache of {format_bytes(memory_bytes)} holds requests of up to {limit} tokens; it must hold one "
                f"of {longest_tokens} tokens, which takes {format_bytes(need_bytes)}: give it that much, or wait until "
                "longer requests have ended",
                need_bytes=need_bytes,
                have_bytes=memory_bytes,
                fitting_tokens=limit,
            )
        before = _slabs_by_class(self._now)
        try:
            for stage_class, num_slabs in _slabs_by_class(resized).items():
                self._manager.resize(num_slabs, stage_class)
        except CapacityError as error:
            for stage_class, num_slabs in before.items():
                self._manager.resize(num_slabs, stage_class)
            raise CapacityError(
                f"a KV cache of {format_bytes(memory_bytes)} is too small now: {error}",
                need_bytes=error.need_bytes,
                have_bytes=memory_bytes,
                fitting_tokens=None,
            ) from error
        self._now = resized
        return limit

    def release_free_slabs(self) -> None:
        """Give the memory of slabs that nobody has borrowed back to the system; the workers have done every step."""
        freed = {stage_class: self._manager.take_freed_slabs(stage_class) for stage_class in _slabs_by_class(self._now)}
        if any(map(len, freed.values())):
            self._executor.collective_rpc(
                "release_slabs", args_by_rank=[(freed[config.stage_class],) for config in self._now]
            )

    def _with_memory(self, memory_bytes: int) -> list[KVCacheConfig]:
        num_slabs: dict[int, int] = {}
        for config in self._planned:
            fit = max(0, memory_bytes - config.null_page_bytes) // max(1, config.slab_bytes)
            num_slabs[config.stage_class] = min(fit, num_slabs.get(config.stage_class, config.num_slabs))
        return [replace(config, num_slabs=num_slabs[config.stage_class]) for config in self._planned]


def _slabs_by_class(configs: Sequence[KVCacheConfig]) -> dict[int, int]:
    return {config.stage_class: config.num_slabs for config in configs}


def _max_request_tokens(config: KVCacheConfig) -> int:
    return min(config.max_model_len, capacity.max_request_tokens(config))


def _bytes_of_request(config: KVCacheConfig, num_tokens: int) -> int:
    pages = capacity.peak_pages(config.groups, num_tokens, config.num_lookahead_tokens)
    return capacity.slabs_needed(pages, config.groups) * config.slab_bytes + config.null_page_bytes
