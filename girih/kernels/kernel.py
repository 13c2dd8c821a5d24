"""`Kernel`: a compiled function by its C address, kept on disk."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from fcntl import LOCK_EX, flock
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numba import from_dtype

from girih.kv.compiled import kept_on_disk


class Kernel:
    """A compiled function without a result, by its C address.

    Args:
        function: takes one record of numbers; makes no array.
        arguments: the record's fields.
    """

    def __init__(self, function: Callable[..., Any], arguments: np.dtype[Any]):
        folders = {Path(__file__).parent, Path(inspect.getfile(function)).parent}
        self._compiled = kept_on_disk(function, *folders, no_cpython_wrapper=True, _nrt=False, error_model="numpy")
        self._types = (from_dtype(arguments),)

    @cached_property
    def address(self) -> int:
        """Return the address of `void function(arguments *)`; compiled, or loaded, when first asked for."""
        with self._one_process():
            self._compiled.compile(self._types)
        made = self._compiled.overloads[self._types]
        return made.library.get_pointer_to_function(made.fndesc.llvm_cfunc_wrapper_name)

    @contextmanager
    def _one_process(self) -> Iterator[None]:
        """Let other processes wait, which then find what this one has compiled; without files, each does it itself."""
        with ExitStack() as stack:
            with suppress(OSError, AttributeError):  # no place to write, or, where numba keeps nothing, no such names
                cache = self._compiled._cache
                cache._impl.locator.ensure_cache_path()
                lock = cache._cache_file._index_path.removesuffix("nbi") + "lock"
                flock(stack.enter_context(open(lock, "ab")), LOCK_EX)
            yield
