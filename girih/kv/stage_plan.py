"""One stage: the layouts of its layers in its memory, and the choice between them.

What a length costs is decided by trying the very layouts that would be used, so that the refusal's "need" and "longest
that fits" are sizes and lengths that a second try accepts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from girih.errors import CapacityError
from girih.kv.capacity import largest, peak_pages, slabs_needed
from girih.kv.config import KVCacheConfig
from girih.kv.grouping import DEFAULT_BLOCK_TOKENS, LayerGroup, group_layers
from girih.kv.layout import MAX_PAGE_ID, Load, last_page_id, need_bytes, score, slab_layout, slab_layouts
from girih.kv.pages import PageLayout, page_layout
from girih.kv.retention import NO_LIMIT, Retention
from girih.kv.stages import Stage
from girih.units import cdiv, format_bytes

GOOD_SCORE = 0.97  # a layout that holds this share of the ideal is taken as it is; below it the user is told
GROUP_COST = 0.005  # share of the ideal that one more group, hence one more block table in every step, must gain
MAX_PIECES = 16  # groups that the largest group may be split into


@dataclass(frozen=True)
class StageOptions:
    """What is the same for all stages.

    Args:
        block_size: tokens per block that the user asked for, if any.
        step_tokens: tokens that one request computes per step on average when the batch is full.
        num_lookahead_tokens: draft tokens beyond the confirmed ones.
        memory_option: what the user would change for more memory; for messages.
    """

    block_size: int | None
    step_tokens: int
    num_lookahead_tokens: int
    memory_option: str


@dataclass(frozen=True)
class Choice:
    """A layout and how good it is.

    Args:
        layout: the pool of one worker.
        score: share of the ideal that it holds; see `layout.score`.
    """

    layout: KVCacheConfig
    score: float

    @property
    def value(self) -> float:
        """Return the score less what its groups cost in every step."""
        return self.score - GROUP_COST * len(self.layout.groups)


@dataclass(frozen=True)
class Grouping:
    """One way to group a stage's layers.

    Args:
        groups: the groups.
        memory_bytes: what pool and null page may take together.
        num_lookahead_tokens: draft tokens beyond the confirmed ones.
    """

    groups: tuple[LayerGroup, ...]
    memory_bytes: int
    num_lookahead_tokens: int

    @cached_property
    def pages(self) -> tuple[PageLayout, ...]:
        """Return the page of each group."""
        return tuple(page_layout(group) for group in self.groups)

    @cached_property
    def layouts(self) -> list[KVCacheConfig]:
        """Return every pool worth comparing, by growing slab."""
        return slab_layouts(self.pages, self.memory_bytes, self.num_lookahead_tokens)

    def fitting(self, num_tokens: int) -> Iterator[KVCacheConfig]:
        """Yield the layouts in which a request that runs alone can reach `num_tokens` tokens, by growing slab."""
        if self._with_room:
            peak = peak_pages(self._with_room[0].groups, num_tokens, self.num_lookahead_tokens)
            for layout in self._with_room:
                if slabs_needed(peak, layout.groups) <= layout.num_slabs:
                    yield layout

    @cached_property
    def _with_room(self) -> list[KVCacheConfig]:
        return [layout for layout in self.layouts if layout.num_slabs >= len(layout.groups)]

    def layout_like(self, other: KVCacheConfig) -> KVCacheConfig | None:
        """Return the layout with the groups of `other`, in its order, and its pages per slab; None without them."""
        wanted = [group.key for group in other.groups]
        pages = sorted(self.pages, key=lambda page: wanted.index(page.key) if page.key in wanted else -1)
        if [page.key for page in pages] != wanted:
            return None
        counts = [group.pages_per_slab for group in other.groups]
        return slab_layout(pages, counts, self.memory_bytes, self.num_lookahead_tokens) if counts else other


class StagePlanner:
    """The layouts of one stage, and the choice between them.

    Args:
        stage: its layers and its memory.
        options: what is the same for all stages.
    """

    def __init__(self, stage: Stage, options: StageOptions):
        self.stage = stage
        self.options = options
        self._distinct_caches = tuple({cache.keeper: cache for cache in stage.caches}.values())
        self._ways: dict[tuple[Retention, ...], list[Grouping]] = {}

    def choices(self, max_model_len: int) -> list[Choice]:
        """Return the layouts in which a lone request of this length fits, best first; none if there is none.

        Whole groups are taken if a layout of them reaches `GOOD_SCORE`. Otherwise smaller pages are tried, and every
        group more must pay for its block table: `GROUP_COST`. A pool with few slabs per group scores low by itself.
        """
        found: list[Choice] = []
        for grouping in self._ways_to_group(max_model_len):
            found += self._scored(grouping.fitting(max_model_len), max_model_len)
            found.sort(key=lambda choice: choice.value, reverse=True)  # the first of equal ones has the smallest slab
            if found and found[0].score >= GOOD_SCORE:
                break
        return found

    def choose_like(self, other: KVCacheConfig, max_model_len: int) -> Choice | None:
        """Return the layout with the groups and pages per slab of `other`, if this stage has one where a request fits.

        Args:
            other: a layout of another stage.
            max_model_len: the length that a lone request must reach, in tokens.
        """
        for grouping in self._ways_to_group(max_model_len):
            if (layout := grouping.layout_like(other)) is not None:
                peak = peak_pages(layout.groups, max_model_len, layout.num_lookahead_tokens)
                fits = slabs_needed(peak, layout.groups) <= layout.num_slabs
                return self._scored([layout], max_model_len)[0] if fits else None
        return None

    def longest(self, limit: int) -> int:
        """Return the longest request in tokens, up to `limit`, for which some layout has room; 0 if none."""
        if self._fits(limit):
            return limit
        # lengths that end in one block of the smallest size cost the same, so whole blocks are tried first
        block_size = self.options.block_size or DEFAULT_BLOCK_TOKENS
        lookahead = self.options.num_lookahead_tokens
        last = cdiv(limit + lookahead, block_size) - 1
        blocks = largest(last, lambda count: self._fits(max(1, count * block_size - lookahead)))
        whole = max(0, blocks * block_size - lookahead)
        # up to the length of a window its layers need no group of their own, also in the middle of a block
        return whole + largest(min(block_size, limit - whole) - 1, lambda more: self._fits(whole + more))

    def refusal(self, max_model_len: int, fitting_tokens: int, who: str) -> CapacityError:
        """Make the error for a length that does not fit: need, have, what fits, the options to change.

        Where no memory would do, as block tables could not number the pages, it says that.

        Args:
            max_model_len: the length in tokens.
            fitting_tokens: the longest request that fits, on all stages; 0 if none does.
            who: e.g. "worker 3 has".
        """
        memory_bytes, what = self.stage.memory_bytes, f"the KV cache of one request of {max_model_len} tokens needs"
        layouts = [layout for grouping in self._ways_to_group(max_model_len) for layout in grouping.layouts]
        last_id = min(last_page_id(layout, max_model_len) for layout in layouts)
        possible = [layout for layout in layouts if last_page_id(layout, max_model_len) <= MAX_PAGE_ID]
        need = min(need_bytes(layout, max_model_len) for layout in possible or layouts)
        what_fits = (
            f"the longest request that fits has {fitting_tokens} tokens: lower --max-model-len to that or set it to "
            f"auto, or "
            if fitting_tokens
            else "not even one block fits: "
        )
        if possible:
            have = format_bytes(max(0, memory_bytes))
            if memory_bytes < 0:
                have += f" (everything else overdraws the budget by {format_bytes(-memory_bytes)})"
            message = f"{what} {format_bytes(need)}, {who} {have}; {what_fits}raise "
            message += self.options.memory_option
        else:  # whatever memory there is
            message = f"{what} a pool with {last_id} pages of one group, block tables number {MAX_PAGE_ID}; {what_fits}"
            message += "lower --num-speculative-tokens" if self.options.num_lookahead_tokens else "raise --block-size"
        return CapacityError(message, need_bytes=need, have_bytes=memory_bytes, fitting_tokens=fitting_tokens or None)

    def _scored(self, layouts: Iterable[KVCacheConfig], max_model_len: int) -> list[Choice]:
        load = Load.up_to(max_model_len, self.options.step_tokens)
        return [Choice(layout, round(score(layout, self.stage.memory_bytes, load), 4)) for layout in layouts]

    def _fits(self, num_tokens: int) -> bool:
        return any(True for grouping in self._ways_to_group(num_tokens) for _ in grouping.fitting(num_tokens))

    def _ways_to_group(self, max_model_len: int) -> Iterator[Grouping]:
        """Yield the ways to group, best first.

        First windows that no sequence outgrows count as full attention; then they do not, for the rare pool in which
        a group less leaves a longer tail. Each time first whole, then with the largest group in more and more pieces.
        """
        keys = [
            tuple(cache.retention_key(limit) for cache in self._distinct_caches) for limit in (max_model_len, NO_LIMIT)
        ]
        for key, limit in dict(zip(keys, (max_model_len, NO_LIMIT), strict=True)).items():
            if key not in self._ways:
                groups = group_layers(self.stage.caches, limit, self.options.block_size)
                whole = Grouping(groups, self.stage.memory_bytes, self.options.num_lookahead_tokens)
                self._ways[key] = [whole, *_split(whole)]
            yield from self._ways[key]


def _split(whole: Grouping) -> Iterator[Grouping]:
    """Yield the groupings with the group of the largest page cut into 2, 3, ... equal pieces.

    Smaller pages make smaller slabs, which several groups share better in a small pool. A lone group shares with
    nobody and stays whole.
    """
    if len(whole.groups) <= 1:
        return
    index = max(range(len(whole.pages)), key=lambda index: whole.pages[index].page_size_bytes)
    before, group, behind = whole.groups[:index], whole.groups[index], whole.groups[index + 1 :]
    for num_pieces in range(2, min(len(group.caches), MAX_PIECES) + 1):
        if len(group.caches) % num_pieces == 0:
            yield replace(whole, groups=(*before, *group.split(num_pieces), *behind))
