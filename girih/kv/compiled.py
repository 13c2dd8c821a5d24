"""How the cache's run time is compiled: the only file that names numba.

A compiled function is kept on disk, beside its source or in the user's cache directory ($NUMBA_CACHE_DIR says another),
so that only the first start after an installation spends seconds on it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from numba import njit

logger = logging.getLogger(__name__)

inner = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)  # type: ignore[call-overload]  # its stub lacks these
"""Decorates what only compiled functions call: no wrapper to compile, and cached as a part of its callers."""


def entry(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate what Python calls; where nothing can be kept on disk it is compiled at every start."""
    try:
        return njit(cache=True)(function)
    except RuntimeError as error:  # numba: no directory to cache in
        logger.warning("compiling %s at every start: %s; set NUMBA_CACHE_DIR", function.__name__, error)
        return njit(function)
