"""The pool's compiled functions, to be called from Python one at a time."""

import numpy as np

from girih.kv.compiled import entry
from girih.kv.pool_state import PoolState
from girih.kv.slab_pool import count_hit, evict, fits, pin_page, release_page, take_page, take_spare_page


@entry
def call_fits(pool: PoolState, extra: np.ndarray) -> bool:
    return fits(pool, extra)


@entry
def call_take(pool: PoolState, group: int, column: int) -> int:
    return take_page(pool, group, column)


@entry
def call_take_spare(pool: PoolState, group: int, column: int, worth: int) -> int:
    return take_spare_page(pool, group, column, worth)


@entry
def call_pin(pool: PoolState, group: int, page: int) -> None:
    pin_page(pool, group, page)
    count_hit(pool, page)


@entry
def call_release(pool: PoolState, group: int, page: int, worth: int) -> None:
    release_page(pool, group, page, worth)


@entry
def call_evict(pool: PoolState, group: int, page: int) -> None:
    evict(pool, group, page)
