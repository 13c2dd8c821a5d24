"""Pages of several sizes -> one slab size that wastes least. Pure arithmetic; knows no spec type.

A slab holds a whole number k_g of the pages of any one group:

    slab_bytes = round_up(max over groups of k_g * page_g, alignment * lcm(all k_g)),   stride_g = slab_bytes / k_g

so that page i of group g starts at i * stride_g and every layer's cache is one strided view of the pool.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from girih.kv.capacity import peak_pages, slabs_needed
from girih.kv.config import KVCacheConfig, KVCacheGroupSpec
from girih.kv.pages import PageLayout
from girih.units import round_up

MAX_PAGES_PER_SLAB = 64  # of the largest pages
MAX_LOWERED = 64  # how far below its floor a pages-per-slab count is looked for, at most
MAX_PAGE_ID = 2**31 - 2  # block tables are int32, and the null page's id is one past the last


@dataclass(frozen=True)
class Load:
    """What the pool is expected to hold; layouts are compared by how much of it they take.

    Args:
        lengths: request lengths in tokens; the worst one counts.
        step_tokens: tokens that one request computes per step on average when the batch is full.
    """

    lengths: tuple[int, ...]
    step_tokens: int

    def pages(self, group: KVCacheGroupSpec, num_tokens: int, num_lookahead_tokens: int) -> int:
        """Return the live blocks of a request that computes the last `step_tokens` of its `num_tokens` tokens."""
        num_new = min(self.step_tokens, num_tokens)
        first, last = group.retention.live_range(num_tokens - num_new, num_new, group.block_size, num_lookahead_tokens)
        return last - first


def slab_layouts(
    pages: Sequence[PageLayout], memory_bytes: int, max_model_len: int, num_lookahead_tokens: int
) -> Iterator[KVCacheConfig]:
    """Make every pool worth comparing, by growing slab; one that gets no slab at all is among them, with 0.

    Args:
        pages: one page layout per group.
        memory_bytes: what pool and null page may take together.
        max_model_len: goes into the plans as it is.
        num_lookahead_tokens: goes into the plans as it is.
    """
    for num_largest in range(1, MAX_PAGES_PER_SLAB + 1):
        counts, slab_bytes = slab_of(pages, num_largest)
        groups = tuple(_group(page, count, slab_bytes) for page, count in zip(pages, counts, strict=True))
        null_page_bytes = slab_bytes // min(counts)
        num_slabs = min((memory_bytes - null_page_bytes) // slab_bytes, MAX_PAGE_ID // max(counts))
        yield KVCacheConfig(max(0, num_slabs), slab_bytes, groups, max_model_len, num_lookahead_tokens)


def slab_of(pages: Sequence[PageLayout], num_largest: int) -> tuple[list[int], int]:
    """Size a slab for `num_largest` of the largest pages.

    Every other group gets as many pages as fit, or up to 1/16 fewer where that keeps the lcm, and with it the
    rounding of the slab, small. One group is decided after the other, largest pages first.

    Returns:
        (pages per slab of each group, slab bytes).
    """
    alignment = math.lcm(*{page.alignment_bytes for page in pages})
    sizes = sorted({page.page_size_bytes for page in pages}, reverse=True)
    target_bytes = num_largest * sizes[0]
    count_of, multiple = {}, 1
    for size in sizes:
        most = target_bytes // size
        choices = range(most, most - min(most // 16, MAX_LOWERED) - 1, -1)
        # the most pages per byte of slab; the first, that is the largest count, wins a tie
        efficiency = {count: count / round_up(target_bytes, alignment * math.lcm(multiple, count)) for count in choices}
        count_of[size] = max(choices, key=efficiency.__getitem__)
        multiple = math.lcm(multiple, count_of[size])
    slab_bytes = round_up(max(size * count for size, count in count_of.items()), alignment * multiple)
    return [count_of[page.page_size_bytes] for page in pages], slab_bytes


def score(config: KVCacheConfig, memory_bytes: int, load: Load) -> float:
    """Compare what a layout holds with what the same bytes could hold without any loss.

    Both are numbers of requests, taken as real ones. Each group's last slab is filled by one page in the worst
    case, which costs 1 - 1/k slabs; so small pools of large slabs score low by themselves.

    Returns:
        The least ratio over the lengths, at most 1.
    """
    lost_slabs = sum(1 - 1 / group.pages_per_slab for group in config.groups)
    ratios = []
    for num_tokens in load.lengths:
        pages = [load.pages(group, num_tokens, config.num_lookahead_tokens) for group in config.groups]
        slabs_each = sum(count / group.pages_per_slab for count, group in zip(pages, config.groups, strict=True))
        bytes_each = sum(count * group.page_size_bytes for count, group in zip(pages, config.groups, strict=True))
        ratios.append(max(0.0, config.num_slabs - lost_slabs) / slabs_each / (memory_bytes / bytes_each))
    return min(ratios)


def need_bytes(config: KVCacheConfig, num_tokens: int) -> int:
    """Return the memory, null page included, with which this layout would serve a lone request of `num_tokens`."""
    pages = peak_pages(config.groups, num_tokens, config.num_lookahead_tokens)
    return slabs_needed(pages, config.groups) * config.slab_bytes + config.null_page_bytes


def _group(page: PageLayout, pages_per_slab: int, slab_bytes: int) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(
        retention=page.retention,
        block_size=page.block_size,
        layers=page.layers,
        page_size_bytes=page.page_size_bytes,
        page_stride_bytes=slab_bytes // pages_per_slab,
        pages_per_slab=pages_per_slab,
    )
