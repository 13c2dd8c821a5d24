"""How much fits: the one formula that start-up, auto-fit, the advertised concurrency and admission all use.

    slabs_needed = sum over groups of ceil(pages of the group / its pages per slab)

The rule behind "pages of a request": it holds the blocks that `Retention.live_range` names for the step it is in.
Blocks that left a window are freed before the next step takes new ones, and the scheduler shrinks a chunk down
to one block before it gives up. So a lone request peaks at `peak_pages`, and decoding ones hold at most `steady_pages`.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence

from girih.kv.config import KVCacheConfig, KVCacheGroupSpec
from girih.units import cdiv


def slabs_needed(pages_per_group: Sequence[int], groups: Sequence[KVCacheGroupSpec]) -> int:
    """Return the slabs that hold these pages when each group packs its own tightly.

    Args:
        pages_per_group: pages of each group.
        groups: the plan's groups, in the same order.
    """
    return sum(cdiv(pages, group.pages_per_slab) for pages, group in zip(pages_per_group, groups, strict=True))


def pages_of_step(
    groups: Sequence[KVCacheGroupSpec], num_computed_tokens: int, num_new_tokens: int, num_lookahead_tokens: int = 0
) -> list[int]:
    """Return the pages of each group that a request holds in a step: exactly, wherever its windows stand."""
    ranges = (
        group.retention.live_range(num_computed_tokens, num_new_tokens, group.block_size, num_lookahead_tokens)
        for group in groups
    )
    return [last - first for first, last in ranges]


def pages_at(groups: Sequence[KVCacheGroupSpec], num_tokens: int, num_lookahead_tokens: int = 0) -> list[int]:
    """Return the pages of each group that a request holds in the decode step that computes its token `num_tokens`.

    A window stands a little better or worse over its blocks from step to step; `steady_pages` is the worst of them.
    """
    return pages_of_step(groups, num_tokens - 1, 1, num_lookahead_tokens)


def peak_pages(groups: Sequence[KVCacheGroupSpec], num_tokens: int, num_lookahead_tokens: int = 0) -> list[int]:
    """Return the most pages of each group that a lone request holds at once on its way to `num_tokens` tokens."""
    return [group.retention.peak_blocks(num_tokens, group.block_size, num_lookahead_tokens) for group in groups]


def steady_pages(groups: Sequence[KVCacheGroupSpec], num_tokens: int, num_lookahead_tokens: int = 0) -> list[int]:
    """Return the most pages of each group that a decoding request of up to `num_tokens` tokens holds at once."""
    return [group.retention.blocks_held(num_tokens, group.block_size, num_lookahead_tokens) for group in groups]


def request_fits(config: KVCacheConfig, num_tokens: int) -> bool:
    """Tell whether a request that runs alone can reach `num_tokens` tokens in this pool."""
    pages = peak_pages(config.groups, num_tokens, config.num_lookahead_tokens)
    return slabs_needed(pages, config.groups) <= config.num_slabs


def max_request_tokens(config: KVCacheConfig) -> int:
    """Return the longest request in tokens, prompt and output, that this plan serves; 0 if not even one token fits.

    For a plan that start-up accepted this is its `max_model_len`.
    """
    return largest(config.max_model_len, lambda num_tokens: request_fits(config, num_tokens))


def num_concurrent_requests(config: KVCacheConfig, num_tokens: int) -> int:
    """Return how many requests of `num_tokens` tokens each the pool holds at once, sharing no prefix.

    Returns:
        Requests; 0 if one alone does not fit, `sys.maxsize` for a model without any cache.
    """
    if not config.groups:
        return sys.maxsize
    if not request_fits(config, num_tokens):
        return 0
    pages = steady_pages(config.groups, num_tokens, config.num_lookahead_tokens)
    at_most = max(config.num_blocks(group) // count for group, count in enumerate(pages))
    return largest(
        at_most, lambda count: slabs_needed([count * held for held in pages], config.groups) <= config.num_slabs
    )


def capacity_tokens(config: KVCacheConfig, num_tokens: int) -> int:
    """Return the tokens the pool holds as requests of `num_tokens` each: their number times their length."""
    return num_concurrent_requests(config, num_tokens) * num_tokens


def max_context_tokens(config: KVCacheConfig, num_requests: int) -> int:
    """Return the longest context in tokens, up to `max_model_len`, that `num_requests` requests can have at once."""
    return largest(config.max_model_len, lambda num_tokens: num_concurrent_requests(config, num_tokens) >= num_requests)


def largest(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest n in 0..limit with fits(n), where fits(0) is taken as true and fits never turns true again."""
    return bisect_left(range(1, limit + 1), True, key=lambda n: not fits(n))
