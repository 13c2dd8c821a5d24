"""What a plan means for a user: bytes per token, requests at once, longest context, waste. Pure numbers for JSON.

Every figure comes from `capacity`, the formula that start-up and admission use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from girih.kv.capacity import capacity_tokens, max_context_tokens, num_concurrent_requests
from girih.kv.config import KVCacheConfig, KVCacheGroupSpec, one_per_class
from girih.kv.layout import Load, score


def request_bytes(config: KVCacheConfig, num_tokens: int) -> int:
    """Return the bytes of the most pages that one request of `num_tokens` tokens holds at once."""
    return sum(_group_bytes(group, num_tokens, config.num_lookahead_tokens) for group in config.groups)


def bytes_per_token(config: KVCacheConfig, num_tokens: int) -> float:
    """Return what the last block of a request of `num_tokens` tokens adds, per token: less once windows are full."""
    return sum(_group_bytes_per_token(group, num_tokens, config.num_lookahead_tokens) for group in config.groups)


def requests_at_once(configs: Sequence[KVCacheConfig], lengths: Sequence[int]) -> list[dict[str, int]]:
    """Count the requests that all workers hold at once.

    Args:
        configs: one plan per worker.
        lengths: of the requests, in tokens.

    Returns:
        Per length {"tokens", "requests", "all_tokens": their product}; nothing for a model without any cache.
    """
    classes = one_per_class(configs)
    if not any(config.groups for config in classes):  # limited by seats, not by bytes
        return []
    return [
        {
            "tokens": tokens,
            "requests": min(num_concurrent_requests(config, tokens) for config in classes),
            "all_tokens": min(capacity_tokens(config, tokens) for config in classes),
        }
        for tokens in lengths
    ]


def longest_context(configs: Sequence[KVCacheConfig], num_users: int) -> dict[str, int]:
    """Return {"users", "tokens"}: the longest context that so many requests can have at once on all workers."""
    classes = one_per_class(configs)
    return {"users": num_users, "tokens": min(max_context_tokens(config, num_users) for config in classes)}


def group_waste(config: KVCacheConfig, memory_bytes: int) -> list[float]:
    """Return per group the share of the memory that holds no page of it, if it borrowed every slab.

    Args:
        config: the plan.
        memory_bytes: what the plan was given; null page, tail and gaps between pages are all waste.
    """
    used = (config.num_blocks(index) * group.page_size_bytes for index, group in enumerate(config.groups))
    return [1 - num_bytes / memory_bytes for num_bytes in used]


def plan_report(config: KVCacheConfig, memory_bytes: int, *, lengths: Sequence[int] = ()) -> dict[str, Any]:
    """Collect the figures of one worker's plan.

    Args:
        config: the plan.
        memory_bytes: what the plan was given.
        lengths: request lengths in tokens to count requests at once for.

    Returns:
        JSON values; sizes in bytes. `usable` is the share of `memory_bytes` that holds cache when the pool is full of
        requests of one length, the least over typical lengths; `waste` is the worst of the groups', see `group_waste`.
    """
    waste = group_waste(config, memory_bytes)
    limit = config.max_model_len
    return {
        "max_model_len": limit,
        "block_size": max((group.block_size for group in config.groups), default=None),
        "kv_bytes_per_token": bytes_per_token(config, 1),
        "kv_bytes_per_token_at_max_model_len": bytes_per_token(config, limit),
        "kv_bytes_per_sequence": request_bytes(config, limit),
        "pool_bytes": config.pool_bytes,
        "num_slabs": config.num_slabs,
        "slab_bytes": config.slab_bytes,
        "null_page_bytes": config.null_page_bytes,
        "spare_bytes": memory_bytes - config.total_bytes,
        "usable": score(config, memory_bytes, Load.up_to(limit, step_tokens=1)),
        "waste": max(waste, default=0.0),
        "num_groups": len(config.groups),
        "groups": [_group_figures(config, index, waste[index]) for index in range(len(config.groups))],
        "requests_at_once": requests_at_once([config], lengths),
    }


def _group_figures(config: KVCacheConfig, index: int, waste: float) -> dict[str, Any]:
    group, limit, lookahead = config.groups[index], config.max_model_len, config.num_lookahead_tokens
    num_readers = sum(layer.spec.cache_owner is not None for layer in group.layers)
    return {
        "retention": group.retention.to_json(),
        "description": group.retention.describe(),
        "holds_state": group.retention.holds_state,
        "num_layers": len(group.layers) - num_readers,
        "num_sharing_layers": num_readers,
        "layer_names": list(group.layer_names),
        "block_size": group.block_size,
        "page_bytes": group.page_size_bytes,
        "page_stride_bytes": group.page_stride_bytes,
        "pages_per_slab": group.pages_per_slab,
        "num_pages": config.num_blocks(index),
        "kv_bytes_per_token": _group_bytes_per_token(group, 1, lookahead),
        "kv_bytes_per_token_at_max_model_len": _group_bytes_per_token(group, limit, lookahead),
        "kv_bytes_per_sequence": _group_bytes(group, limit, lookahead),
        "waste": waste,
    }


def _group_bytes(group: KVCacheGroupSpec, num_tokens: int, num_lookahead_tokens: int) -> int:
    return group.retention.peak_blocks(num_tokens, group.block_size, num_lookahead_tokens) * group.page_size_bytes


def _group_bytes_per_token(group: KVCacheGroupSpec, num_tokens: int, num_lookahead_tokens: int) -> float:
    end = max(num_tokens, 2 * group.block_size)  # what the first block brings may not grow: a state
    grown = _group_bytes(group, end, num_lookahead_tokens)
    return (grown - _group_bytes(group, end - group.block_size, num_lookahead_tokens)) / group.block_size
