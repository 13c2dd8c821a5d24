"""Runs a kernel on the threads that torch computes on, as many as it is told to use (`torch.set_num_threads`).

They are those of the OpenMP library that torch is linked to, so that no other threads compete with them for the cores,
and OMP_WAIT_POLICY and the like hold for all. Python takes no part but to start. What is called can be recorded, see
`girih.kernels.tape`.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from struct import pack, unpack
from typing import Any, NamedTuple

import torch

from girih.kernels.kernel import Kernel

logger = logging.getLogger(__name__)


THREAD_ELEMENTS = 1 << 16
"""So many are worth the start of another thread."""

SHARES_PER_THREAD = 4
"""Rows are taken in so many shares, as some threads may be slower than others."""


class Call(NamedTuple):
    """A kernel as it was called."""

    kernel: Kernel
    record: int | tuple[int, ...]
    """Its address, or the numbers in it, of which `deal_out` has a counter behind."""
    num_threads: int


class _Recorded(threading.local):
    calls: list[Call] | None = None


_recorded = _Recorded()


@contextmanager
def recorded_calls() -> Iterator[list[Call]]:
    """List what this Python thread calls meanwhile."""
    before, _recorded.calls = _recorded.calls, []
    try:
        yield _recorded.calls
    finally:
        _recorded.calls = before


def run(kernel: Kernel, record: int, num_threads: int, most_threads: int) -> None:
    """Call a kernel in several threads at once and wait for them.

    Args:
        kernel: gets the same record in every thread.
        record: its address; what it holds may be written by a kernel that runs before.
        num_threads: at most so many; 0: there is nothing to do.
        most_threads: the same when the call is played again, and the record says something else.
    """
    if _recorded.calls is not None:
        _recorded.calls.append(Call(kernel, record, most_threads))
    if num_threads:
        call_team(kernel, record, num_threads)


def deal_out(kernel: Kernel, fields: Sequence[int], num_threads: int = 1) -> None:
    """Call a kernel whose threads take work until none is left; see `run`.

    Args:
        kernel: its record ends with two numbers more: the address of the other, which is 0 at first, and counts.
        fields: the numbers before those, in order.
        num_threads: at most so many.
    """
    if _recorded.calls is not None:
        _recorded.calls.append(Call(kernel, tuple(fields), num_threads))
    record = counted(fields)
    call_team(kernel, record.buffer_info()[0], num_threads)


def run_brief(kernel: Kernel, fields: Sequence[int]) -> None:
    """Call a kernel that takes some microseconds, in this thread; no other Python thread goes on meanwhile.

    Where one does, this one may have to wait for it much longer than the kernel takes.

    Args:
        kernel: as in `deal_out`.
        fields: as there.
    """
    if _recorded.calls is not None:
        _recorded.calls.append(Call(kernel, tuple(fields), 1))
    record = counted(fields)
    _brief(kernel.address)(record.buffer_info()[0])


def run_rows(kernel: Kernel, num_rows: int, num_elements: int, fields: Sequence[int]) -> None:
    """Call a kernel for some rows, on as many threads as they are worth.

    Args:
        kernel: as in `deal_out`; its record begins with two numbers more: rows, and how many a thread takes at once.
        num_rows: how many.
        num_elements: of all rows.
        fields: the numbers between.
    """
    worth = num_elements // THREAD_ELEMENTS
    if worth < 2 or (num_threads := min(torch.get_num_threads(), worth)) < 2:
        run_brief(kernel, (num_rows, num_rows, *fields))
    else:
        rows_at_once = -(-num_rows // (num_threads * SHARES_PER_THREAD))
        deal_out(kernel, (num_rows, rows_at_once, *fields), num_threads)


@cache
def float_bits(number: float) -> int:
    """Return a float64 as a field of a record."""
    return int(unpack("q", pack("d", number))[0])


def counted(fields: Sequence[int]) -> array[int]:
    """Return a record with the address of a counter behind it, and the counter."""
    record = array("q", (*fields, 0, 0))
    record[-2] = record.buffer_info()[0] + record.itemsize * (len(record) - 1)
    return record


def call_team(kernel: Kernel, record: int, num_threads: int) -> None:
    """Call a kernel in several threads, or in fewer if there are not so many; see `run`. It is never recorded."""
    if num_threads > 1 and (parallel := _openmp("GOMP_parallel")) is not None:
        parallel(kernel.address, record, num_threads, 0)
    else:
        _function(kernel.address)(record)


@cache
def _function(address: int) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


@cache
def _brief(address: int) -> Callable[[int], None]:
    return ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(address)


class Team(NamedTuple):
    """Addresses of functions for the threads that `call_team` has started; zeros where it starts none."""

    number: int = 0
    """`int number(void)`: which thread of the team this is."""
    barrier: int = 0
    """`void barrier(void)`: wait for all of them; for a moment busily, as they wait for work."""


@cache
def team() -> Team:
    """Return the functions for a team."""
    if _openmp("GOMP_parallel") is None:
        return Team()
    functions = [_openmp(name) for name in ("omp_get_thread_num", "GOMP_barrier")]
    return Team(*(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions))


@cache
def _openmp(name: str) -> Any:
    """Return a function of the OpenMP library, None where there is none.

    `GOMP_parallel` runs `function(data)` in some threads; it is GNU's name, which the others offer too.
    """
    try:
        # a library finds the names of all libraries that it is linked to
        function = getattr(ctypes.CDLL(torch._C.__file__), name)
    except (AttributeError, OSError) as error:
        logger.warning("kernels run on one thread, as torch is linked to no OpenMP library: %s", error)
        return None
    if name == "GOMP_parallel":
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        function.restype = None
    return function
