"""Pages of several sizes -> one slab size that wastes least. Pure arithmetic; knows no spec type.

A slab holds a whole number k_g of the pages of any one group:

    slab_bytes = round_up(max over groups of k_g * page_g, alignment * lcm(all k_g)),   stride_g = slab_bytes / k_g

so that page i of group g starts at i * stride_g and every layer's cache is one strided view of the pool.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from girih.kv.capacity import pages_of_step, peak_pages, slabs_needed
from girih.kv.config import KVCacheConfig, KVCacheGroupSpec
from girih.kv.pages import PageLayout
from girih.kv.retention import NO_LIMIT
from girih.units import cdiv, round_up

TYPICAL_LENGTHS = (100, 1_000, 8_192, 32_768)  # requests in tokens, by which layouts are compared
MAX_PAGES_PER_SLAB = 64  # of the largest pages
MAX_LOWERED = 16  # how far below its floor a pages-per-slab count is looked for, at most
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

    @classmethod
    def up_to(cls, max_model_len: int, step_tokens: int) -> Load:
        """Return the typical lengths below `max_model_len`, and that."""
        return cls((*(length for length in TYPICAL_LENGTHS if length < max_model_len), max_model_len), step_tokens)


def slab_layouts(pages: Sequence[PageLayout], memory_bytes: int, num_lookahead_tokens: int) -> list[KVCacheConfig]:
    """Make every pool worth comparing, by growing slab; one that gets no slab at all is among them, with 0.

    Args:
        pages: one page layout per group; without any, the one pool is empty.
        memory_bytes: what pool and null page may take together.
        num_lookahead_tokens: goes into the plans as it is.
    """
    if not pages:
        return [KVCacheConfig(0, 0, (), NO_LIMIT, num_lookahead_tokens)]
    sizes = tuple(page.page_size_bytes for page in pages)
    alignment = math.lcm(*{page.alignment_bytes for page in pages})
    candidates = counts_to_compare(sizes, _shares(pages, num_lookahead_tokens), alignment)
    return [slab_layout(pages, counts, memory_bytes, num_lookahead_tokens) for counts in candidates]


def slab_layout(
    pages: Sequence[PageLayout], counts: Sequence[int], memory_bytes: int, num_lookahead_tokens: int
) -> KVCacheConfig:
    """Make the pool whose slabs hold `counts` pages of each group.

    Args:
        pages: one page layout per group.
        counts: pages per slab of each group.
        memory_bytes: what pool and null page may take together.
        num_lookahead_tokens: goes into the plan as it is.

    Returns:
        The plan, for requests of any length; with 0 slabs if the memory is less than one and the null page.
    """
    alignment = math.lcm(*{page.alignment_bytes for page in pages})
    largest_bytes = max(page.page_size_bytes * count for page, count in zip(pages, counts, strict=True))
    slab_bytes = round_up(largest_bytes, alignment * math.lcm(*counts))
    groups = tuple(
        KVCacheGroupSpec(
            retention=page.retention,
            block_size=page.block_size,
            layers=page.layers,
            page_size_bytes=page.page_size_bytes,
            page_stride_bytes=slab_bytes // count,
            pages_per_slab=count,
        )
        for page, count in zip(pages, counts, strict=True)
    )
    null_page_bytes = slab_bytes // min(counts)
    num_slabs = min((memory_bytes - null_page_bytes) // slab_bytes, MAX_PAGE_ID // max(counts))
    return KVCacheConfig(max(0, num_slabs), slab_bytes, groups, NO_LIMIT, num_lookahead_tokens)


def _shares(pages: Sequence[PageLayout], num_lookahead_tokens: int) -> tuple[float, ...]:
    """Return for each group the greatest share of a request's bytes that it has at any typical length."""
    shares = [0.0] * len(pages)
    for num_tokens in TYPICAL_LENGTHS:
        num_bytes = []
        for page in pages:
            first, last = page.retention.live_range(num_tokens - 1, 1, page.block_size, num_lookahead_tokens)
            num_bytes.append((last - first) * page.page_size_bytes)
        shares = [max(share, own / sum(num_bytes)) for share, own in zip(shares, num_bytes, strict=True)]
    return tuple(round(share, 3) for share in shares)


@lru_cache(maxsize=256)
def counts_to_compare(sizes: tuple[int, ...], shares: tuple[float, ...], alignment: int) -> tuple[tuple[int, ...], ...]:
    """Choose the pages per slab of every group, for slabs of 1, 2, .. 64 of the largest pages.

    Every other group gets as many pages as fit, or one more in a slab that is as much larger, or fewer where that keeps
    the lcm, and with it the rounding of the slab, small: a little fewer, or, for a group that hardly counts, as many as
    the lcm so far allows for nothing. One group is decided after the other, largest pages first.

    Args:
        sizes: page bytes of each group.
        shares: of a request's bytes that each group has, at most.
        alignment: that every page needs.

    Returns:
        Pages per slab of each group, in the order of `sizes`; by growing slab.
    """
    share_of = {size: 0.0 for size in sorted(sizes, reverse=True)}
    for size, share in zip(sizes, shares, strict=True):
        share_of[size] = min(1.0, share_of[size] + share)
    slabs = itertools.product(range(1, MAX_PAGES_PER_SLAB + 1), (0, 1))
    return tuple(dict.fromkeys(_counts(sizes, share_of, alignment, num_largest, more) for num_largest, more in slabs))


def _counts(
    sizes: tuple[int, ...], share_of: dict[int, float], alignment: int, num_largest: int, more: int
) -> tuple[int, ...]:
    count_of: dict[int, int] = {max(sizes): num_largest}
    slab_bytes, multiple = num_largest * max(sizes), num_largest
    for size, share in share_of.items():
        if size in count_of:
            continue
        most = slab_bytes // size
        best, least = most, math.inf
        lowered = range(most + more, most - min(most // 16, MAX_LOWERED) - 1, -1)
        for count in (*_free_counts(most, multiple), *lowered):
            # the slab's bytes without and with rounding, times what this group's requests take of it
            at_least = max(slab_bytes, count * size)
            taken = 1 - share + share * slab_bytes / (count * size)
            if at_least * taken < least:
                unit = alignment * math.lcm(multiple, count)
                cost = cdiv(at_least, unit) * unit * taken
                if cost < least:
                    best, least = count, cost
        count_of[size] = best
        slab_bytes, multiple = max(slab_bytes, best * size), math.lcm(multiple, best)
    return tuple(count_of[size] for size in sizes)


def _free_counts(most: int, multiple: int) -> tuple[int, ...]:
    """Return numbers up to `most` with a small lcm with `multiple`: it and a multiple of it, or one of its divisors."""
    if multiple <= most:
        return most // multiple * multiple, multiple
    first = cdiv(multiple, most)
    divisors = (divisor for divisor in range(first, first + MAX_LOWERED) if multiple % divisor == 0)
    return (multiple // next(divisors, multiple),)


def score(config: KVCacheConfig, memory_bytes: int, load: Load) -> float:
    """Compare what a layout holds with what the same bytes could hold without any loss.

    Both are numbers of requests, taken as real ones. Each group's last slab is filled by one page in the worst
    case, which costs 1 - 1/k slabs; so small pools of large slabs score low by themselves.

    Returns:
        The least ratio over the lengths, at most 1.
    """
    if not config.groups:
        return 1.0
    num_slabs = max(0.0, config.num_slabs - sum(1 - 1 / group.pages_per_slab for group in config.groups))
    ratios = []
    for num_tokens in load.lengths:
        num_new = min(load.step_tokens, num_tokens)
        pages = pages_of_step(config.groups, num_tokens - num_new, num_new, config.num_lookahead_tokens)
        slabs_each = sum(count / group.pages_per_slab for count, group in zip(pages, config.groups, strict=True))
        bytes_each = sum(count * group.page_size_bytes for count, group in zip(pages, config.groups, strict=True))
        ratios.append(num_slabs * bytes_each / (slabs_each * memory_bytes))
    return min(ratios)


def need_bytes(config: KVCacheConfig, num_tokens: int) -> int:
    """Return the memory, null page included, with which this layout would serve a lone request of `num_tokens`."""
    pages = peak_pages(config.groups, num_tokens, config.num_lookahead_tokens)
    return slabs_needed(pages, config.groups) * config.slab_bytes + config.null_page_bytes


def last_page_id(config: KVCacheConfig, num_tokens: int) -> int:
    """Return the greatest page id, a null page's, if this layout served a lone request of `num_tokens` and no more."""
    pages = peak_pages(config.groups, num_tokens, config.num_lookahead_tokens)
    return slabs_needed(pages, config.groups) * max((group.pages_per_slab for group in config.groups), default=0)
