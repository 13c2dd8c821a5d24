"""What a plan means for a user: bytes per token, requests at once, longest context, waste. Pure numbers for JSON.

Every figure comes from `capacity`, the formula that start-up and admission use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from girih.kv.capacity import capacity_tokens, max_context_tokens, num_concurrent_requests, peak_pages
from girih.kv.config import KVCacheConfig


def request_bytes(config: KVCacheConfig, num_tokens: int) -> int:
    """Return the bytes of the most pages that one request of `num_tokens` tokens holds at once."""
    pages = peak_pages(config.groups, num_tokens, config.num_lookahead_tokens)
    return sum(count * group.page_size_bytes for count, group in zip(pages, config.groups, strict=True))


def bytes_per_token(config: KVCacheConfig, num_tokens: int) -> float:
    """Return what the last block of a request of `num_tokens` tokens adds, per token: less once windows are full."""
    block_size = max((group.block_size for group in config.groups), default=1)
    before = max(0, num_tokens - block_size)
    return (request_bytes(config, before + block_size) - request_bytes(config, before)) / block_size


def group_waste(config: KVCacheConfig, memory_bytes: int) -> list[float]:
    """Return per group the share of the memory that holds no page of it, if it borrowed every slab.

    Args:
        config: the plan.
        memory_bytes: what the plan was given; null page, tail and gaps between pages are all waste.
    """
    used = (config.num_blocks(index) * group.page_size_bytes for index, group in enumerate(config.groups))
    return [1 - num_bytes / memory_bytes for num_bytes in used]


def plan_report(
    config: KVCacheConfig, memory_bytes: int, *, lengths: Sequence[int], num_users: int | None = None
) -> dict[str, Any]:
    """Collect the figures of a plan.

    Args:
        config: the plan.
        memory_bytes: what the plan was given.
        lengths: request lengths in tokens to count requests at once for.
        num_users: requests at once to find the longest context for; None leaves that out.

    Returns:
        JSON values; sizes in bytes, `waste` the worst of the groups' as a share of `memory_bytes`.
    """
    waste = group_waste(config, memory_bytes)
    limit = config.max_model_len
    figures: dict[str, Any] = {
        "max_model_len": limit,
        "block_size": config.groups[0].block_size if config.groups else None,
        "kv_bytes_per_token": bytes_per_token(config, 1),
        "kv_bytes_per_token_at_max_model_len": bytes_per_token(config, limit),
        "kv_bytes_per_sequence": request_bytes(config, limit),
        "pool_bytes": config.pool_bytes,
        "num_slabs": config.num_slabs,
        "slab_bytes": config.slab_bytes,
        "null_page_bytes": config.null_page_bytes,
        "waste": max(waste, default=0.0),
        "groups": [_group_figures(config, index, waste[index]) for index in range(len(config.groups))],
    }
    if config.groups:  # a model without any cache is limited by seats, not by bytes
        figures["requests_at_once"] = [
            {
                "tokens": tokens,
                "requests": num_concurrent_requests(config, tokens),
                "all_tokens": capacity_tokens(config, tokens),
            }
            for tokens in lengths
        ]
        if num_users is not None:
            figures["longest_context"] = {"users": num_users, "tokens": max_context_tokens(config, num_users)}
    return figures


def _group_figures(config: KVCacheConfig, index: int, waste: float) -> dict[str, Any]:
    group = config.groups[index]
    return {
        "retention": group.retention.to_json(),
        "description": group.retention.describe(),
        "num_layers": len(group.layers),
        "layer_names": list(group.layer_names),
        "block_size": group.block_size,
        "page_bytes": group.page_size_bytes,
        "page_stride_bytes": group.page_stride_bytes,
        "pages_per_slab": group.pages_per_slab,
        "num_pages": config.num_blocks(index),
        "waste": waste,
    }
