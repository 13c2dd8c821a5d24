"""The plan: what every layer asks for + what every worker has -> one `KVCacheConfig` per worker.

Composes grouping, pages, layout and capacity; pure, and done before anything is allocated. One stage class: all
workers hold the same layers. What a length costs is decided by trying the very layouts that would be used, so that
the refusal's "need" and "longest that fits" are lengths and sizes that a second try accepts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from girih.errors import CapacityError, ConfigError, PlanError
from girih.kv.capacity import largest, max_request_tokens, request_fits
from girih.kv.config import KVCacheConfig
from girih.kv.grouping import LayerGroup, common_block_size, group_layers
from girih.kv.layout import Load, need_bytes, score, slab_layouts
from girih.kv.pages import PageLayout, page_layout
from girih.kv.retention import Retention
from girih.kv.spec import KVCacheSpec
from girih.units import cdiv, format_bytes

logger = logging.getLogger(__name__)

GOOD_SCORE = 0.97  # a layout that holds this share of the ideal is taken as it is
GROUP_COST = 0.005  # share of the ideal that one more group, hence one more block table in every step, must gain
MAX_PIECES = 16  # groups that the largest group may be split into
TYPICAL_LENGTHS = (100, 1_000, 8_192, 32_768)  # requests in tokens, by which layouts are compared
NO_LIMIT = 1 << 62  # tokens; no window reaches it


def get_kv_cache_configs(
    specs: Sequence[Mapping[str, KVCacheSpec]],
    available_memory: Sequence[int],
    *,
    max_model_len: int | str,
    model_limit: int | None = None,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 256,
    block_size: int | None = None,
    num_lookahead_tokens: int = 0,
) -> list[KVCacheConfig]:
    """Plan the KV cache of every worker.

    Args:
        specs: per worker, layer name -> spec, in model order.
        available_memory: per worker, the bytes that pool and null page may take together.
        max_model_len: longest request in tokens, or "auto": the longest that the model and the memory allow.
        model_limit: the model's own length limit in tokens; needed for "auto".
        max_num_batched_tokens: tokens computed in one step; with `max_num_seqs` it says how many tokens of a request
            are in flight in a full batch, for which the layout is chosen. No memory is set aside for them.
        max_num_seqs: requests computed at once.
        block_size: tokens per block; None takes the smallest multiple of 16 that every attention backend takes.
        num_lookahead_tokens: draft tokens that a step may write beyond the confirmed ones.

    Returns:
        One plan per worker, all equal: the worker with the least memory decides.

    Raises:
        CapacityError: a request of `max_model_len` tokens does not fit; need, have, what fits, the options to change.
        PlanError: workers with different layers, or a block size that the attention backend does not take.
        ConfigError: a limit that is no number, or longer than the model's.
    """
    if len(specs) != len(available_memory) or not specs:
        raise PlanError(f"got cache specs of {len(specs)} workers and memory of {len(available_memory)}")
    limit = _length_limit(max_model_len, model_limit)
    layers = _same_layers(specs)
    if not layers:
        return [KVCacheConfig(0, 0, (), limit, num_lookahead_tokens) for _ in specs]
    planner = _Planner(
        layers=layers,
        block_size=common_block_size(layers.values(), block_size),
        memory_bytes=min(available_memory),
        step_tokens=cdiv(max_num_batched_tokens, max_num_seqs),
        num_lookahead_tokens=num_lookahead_tokens,
    )
    config = planner.choose_auto(limit) if max_model_len == "auto" else planner.choose(limit)
    if config is None:
        least = available_memory.index(planner.memory_bytes)
        raise planner.refusal(limit, who=f"worker {least} has" if len(specs) > 1 else "there is")
    return [config for _ in specs]


class _Planner:
    """The layouts of one set of layers in one amount of memory, and the choice between them.

    Args:
        layers: layer name -> spec, in model order.
        block_size: tokens per block.
        memory_bytes: what pool and null page may take together.
        step_tokens: tokens that one request computes per step on average when the batch is full.
        num_lookahead_tokens: draft tokens beyond the confirmed ones.
    """

    def __init__(
        self,
        layers: Mapping[str, KVCacheSpec],
        *,
        block_size: int,
        memory_bytes: int,
        step_tokens: int,
        num_lookahead_tokens: int,
    ):
        self.layers = layers
        self.block_size = block_size
        self.memory_bytes = memory_bytes
        self.step_tokens = step_tokens
        self.num_lookahead_tokens = num_lookahead_tokens
        self._distinct_specs = tuple(dict.fromkeys(layers.values()))
        self._ways: dict[tuple[Retention, ...], list[tuple[KVCacheConfig, ...]]] = {}

    def choose(self, max_model_len: int) -> KVCacheConfig | None:
        """Return the best layout in which a lone request of this length fits; None if there is none.

        Whole groups are taken if a layout of them reaches `GOOD_SCORE`. Otherwise smaller pages are tried, and every
        group more must pay for its block table: `GROUP_COST`. A pool with few slabs per group scores low by itself.
        """
        lengths = (*(length for length in TYPICAL_LENGTHS if length < max_model_len), max_model_len)
        load = Load(lengths, self.step_tokens)
        best, best_value, best_score = None, -math.inf, 0.0
        for layouts in self._ways_to_group(max_model_len):
            # layouts come by growing slab, so the first of equal ones has the smallest
            for layout in layouts:
                if request_fits(layout, max_model_len):
                    layout_score = round(score(layout, self.memory_bytes, load), 4)
                    value = layout_score - GROUP_COST * len(layout.groups)
                    if value > best_value:
                        best, best_value, best_score = layout, value, layout_score
            if best_score >= GOOD_SCORE:
                break
        if best is None:
            return None
        if best_score < GOOD_SCORE and len(best.groups) > 1:
            logger.warning(
                "%s of KV cache is little for %d groups of layers to share: it holds about %.0f %% of what its bytes "
                "could; more memory helps (--kv-cache-memory, --memory-utilization)",
                format_bytes(self.memory_bytes), len(best.groups), 100 * best_score,
            )  # fmt: skip
        return replace(best, max_model_len=max_model_len)

    def choose_auto(self, limit: int) -> KVCacheConfig | None:
        """Return the best layout for about the longest request that fits, up to `limit` tokens; None if none fits.

        A layout may fall short of the longest by 1 - GOOD_SCORE: the last few tokens are not worth a worse one.
        """
        longest = self.longest(limit)
        config = self.choose(max(1, int(GOOD_SCORE * longest))) if longest else None
        if config is None:
            return None
        return replace(config, max_model_len=max_request_tokens(replace(config, max_model_len=limit)))

    def longest(self, limit: int) -> int:
        """Return the longest request in tokens, up to `limit`, for which some layout has room; 0 if none."""
        if self._fits(limit):
            return limit
        # all lengths that end in one block cost the same, so whole blocks are tried
        last = cdiv(limit + self.num_lookahead_tokens, self.block_size) - 1
        blocks = largest(last, lambda count: self._fits(max(1, self._tokens_in(count))))
        return max(0, self._tokens_in(blocks))

    def refusal(self, max_model_len: int, who: str) -> CapacityError:
        """Make the error for a length that does not fit: need, have, what fits, the options to change."""
        layouts = [layout for layouts in self._ways_to_group(max_model_len) for layout in layouts]
        need = min(need_bytes(layout, max_model_len) for layout in layouts)
        fitting = self.longest(max_model_len)
        have = format_bytes(max(0, self.memory_bytes))
        if self.memory_bytes < 0:
            have += f" (everything else overdraws the budget by {format_bytes(-self.memory_bytes)})"
        what_fits = (
            f"the longest request that fits has {fitting} tokens: lower --max-model-len to that or set it to auto, or "
            if fitting
            else "not even one block fits: "
        )
        return CapacityError(
            f"the KV cache of one request of {max_model_len} tokens needs {format_bytes(need)}, {who} {have}; "
            f"{what_fits}raise --kv-cache-memory or --memory-utilization",
            need_bytes=need,
            have_bytes=self.memory_bytes,
            fitting_tokens=fitting or None,
        )

    def _tokens_in(self, num_blocks: int) -> int:
        return num_blocks * self.block_size - self.num_lookahead_tokens

    def _fits(self, num_tokens: int) -> bool:
        ways = self._ways_to_group(num_tokens)
        return any(request_fits(layout, num_tokens) for layouts in ways for layout in layouts)

    def _ways_to_group(self, max_model_len: int) -> Iterator[tuple[KVCacheConfig, ...]]:
        """Yield the layouts of each way to group, best way first.

        First windows that no sequence outgrows count as full attention; then they do not, for the rare pool in which
        a group less leaves a longer tail. Each time first whole, then with the largest group in more and more pieces.
        """
        keys = [
            tuple(spec.retention_key(limit) for spec in self._distinct_specs) for limit in (max_model_len, NO_LIMIT)
        ]
        for key, limit in dict(zip(keys, (max_model_len, NO_LIMIT), strict=True)).items():
            if key not in self._ways:
                groups = group_layers(self.layers, limit)
                self._ways[key] = [self._layouts(pages) for pages in _ways_to_split(groups, self.block_size)]
            yield from self._ways[key]

    def _layouts(self, pages: tuple[PageLayout, ...]) -> tuple[KVCacheConfig, ...]:
        return tuple(slab_layouts(pages, self.memory_bytes, NO_LIMIT, self.num_lookahead_tokens))


def _ways_to_split(groups: tuple[LayerGroup, ...], block_size: int) -> Iterator[tuple[PageLayout, ...]]:
    """Yield the pages of the groups as they are, then with the one of the largest page cut into 2, 3, ... equal pieces.

    Smaller pages make smaller slabs, which several groups share better in a small pool. A lone group shares with
    nobody and stays whole.
    """
    pages = tuple(page_layout(group, block_size) for group in groups)
    yield pages
    if len(groups) == 1:
        return
    index = max(range(len(pages)), key=lambda index: pages[index].page_size_bytes)
    num_layers = len(groups[index].layers)
    for num_pieces in range(2, min(num_layers, MAX_PIECES) + 1):
        if num_layers % num_pieces == 0:
            pieces = (page_layout(piece, block_size) for piece in groups[index].split(num_pieces))
            yield (*pages[:index], *pieces, *pages[index + 1 :])


def _length_limit(max_model_len: int | str, model_limit: int | None) -> int:
    """Return the longest request to plan for, in tokens: the one asked for, or for "auto" the model's own limit."""
    if max_model_len == "auto":
        if model_limit is None:
            raise ConfigError('max_model_len="auto" needs the model\'s own limit (model_limit)')
        return model_limit
    if isinstance(max_model_len, bool) or not isinstance(max_model_len, int) or max_model_len < 1:
        raise ConfigError(f'max_model_len={max_model_len!r} must be a whole number of at least 1, or "auto"')
    if model_limit is not None and max_model_len > model_limit:
        raise ConfigError(
            f"max_model_len={max_model_len} is longer than the model's own limit of {model_limit} tokens; "
            f"lower --max-model-len or set it to auto"
        )
    return max_model_len


def _same_layers(specs: Sequence[Mapping[str, KVCacheSpec]]) -> Mapping[str, KVCacheSpec]:
    """Return the layers that all workers agree on; otherwise name the first one that differs."""
    first = specs[0]
    for rank, other in enumerate(specs):
        for name in (*first, *other):
            if first.get(name) != other.get(name):
                raise PlanError(
                    f"worker {rank} and worker 0 differ in layer {name!r}: {other.get(name)} and {first.get(name)}; "
                    f"all workers must hold the same layers"
                )
    return first
