"""Runs a kernel on the threads that torch computes on, as many as it is told to use (`torch.set_num_threads`).

They are those of the OpenMP library that torch is linked to, so that no other threads compete with them for the cores,
and OMP_WAIT_POLICY and the like hold for all. Python takes no part but to start.
"""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections.abc import Callable, Sequence
from functools import cache

import torch

from girih.kernels.kernel import Kernel

logger = logging.getLogger(__name__)


def run(kernel: Kernel, fields: Sequence[int], num_threads: int = 1) -> None:
    """Call a kernel in several threads at once and wait for them.

    Args:
        kernel: gets the same record in every thread.
        fields: the numbers of its record, in order.
        num_threads: at most so many.
    """
    _call(kernel, array("q", fields), num_threads)


def deal_out(kernel: Kernel, fields: Sequence[int], num_threads: int = 1) -> None:
    """Call a kernel whose threads take work until none is left; see `run`.

    Args:
        kernel: its record ends with two numbers more: the address of the other, which is 0 at first, and counts.
        fields: the numbers before those.
        num_threads: at most so many.
    """
    _call(kernel, _counted(fields), num_threads)


def run_brief(kernel: Kernel, fields: Sequence[int]) -> None:
    """Call a kernel that takes some microseconds, in this thread; no other Python thread goes on meanwhile.

    Where one does, this one may have to wait for it much longer than the kernel takes.

    Args:
        kernel: as in `run` or `deal_out`.
        fields: as there.
    """
    record = _counted(fields)
    _brief(kernel.address)(record.buffer_info()[0])


def _counted(fields: Sequence[int]) -> array[int]:
    """Return a record with a counter behind it, and the counter's address."""
    record = array("q", (*fields, 0, 0))
    record[-2] = record.buffer_info()[0] + record.itemsize * (len(record) - 1)
    return record


def _call(kernel: Kernel, record: array[int], num_threads: int) -> None:
    if num_threads > 1 and (team := _team()) is not None:
        team(kernel.address, record.buffer_info()[0], num_threads, 0)
    else:
        _function(kernel.address)(record.buffer_info()[0])


@cache
def _function(address: int) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


@cache
def _brief(address: int) -> Callable[[int], None]:
    return ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(address)


@cache
def _team() -> Callable[[int, int, int, int], None] | None:
    """Return OpenMP's call that runs `function(data)` in some threads: GNU's, which the others offer too."""
    try:
        # a library finds the names of all libraries that it is linked to
        team = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (AttributeError, OSError) as error:
        logger.warning("kernels run on one thread, as torch is linked to no OpenMP library: %s", error)
        return None
    team.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    team.restype = None
    return team
