"""Pools of a stated size for the benchmarks, and how many of their bytes are held."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from girih.kv import KVCacheConfig, KVCacheManager, KVCacheSpec, get_kv_cache_configs

BLOCK_TOKENS = 16


def plan_pool(specs: Mapping[str, KVCacheSpec], pool_bytes: int, **limits: int) -> KVCacheConfig:
    """Plan one worker's pool of at most `pool_bytes`; the null page comes on top.

    Args:
        specs: layer name -> spec, in model order.
        pool_bytes: bytes of the pool.
        limits: `max_model_len` and other limits of `get_kv_cache_configs`.
    """

    def plan(memory_bytes: int) -> KVCacheConfig:
        return get_kv_cache_configs([specs], [memory_bytes], **limits)[0]

    # no null page is larger than a page of all layers together
    ample = plan(pool_bytes + sum(spec.page_size_bytes(BLOCK_TOKENS) for spec in specs.values()))
    config = plan(pool_bytes + ample.null_page_bytes)
    return config if config.pool_bytes <= pool_bytes else plan(pool_bytes)


def held_bytes(manager: KVCacheManager) -> int:
    """Return the bytes of referenced pages and of the unused part of slabs that groups have borrowed.

    Cached pages are not held: they are given up as soon as somebody needs room.
    """
    stats = manager.stats()
    pages = np.array(stats.referenced_pages) + np.array(stats.free_pages)
    return int(pages @ np.array([group.page_stride_bytes for group in manager.groups], dtype=np.int64))
