"""The kernel that calls kernels: all threads of a team walk a list of calls, and wait for each other between them."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from girih.kernels.kernel import Kernel
from girih.kernels.lanes import INT, array_at, intrinsic, pointer

ENTRY = np.dtype(
    [
        (name, np.int64)
        for name in (
            "function", "record",  # addresses
            "num_threads",  # at most so many take part
            "waits",  # whether all that was called before must be done
        )
    ]
)  # fmt: skip

JOB = np.dtype(
    [
        (name, np.int64)
        for name in (
            "entries", "num_entries",  # address: ENTRY [num_entries]
            "number", "barrier",  # addresses of functions, see `girih.kernels.threads.Team`; 0 where there are no teams
        )
    ]
)  # fmt: skip


@intrinsic
def _call(_typing: Any, function: Any, record: Any) -> Any:
    """Call `void function(void *record)` by its address."""
    bytes_at = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [bytes_at])

    def _build(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.call(pointer(builder, args[0], kind), [builder.inttoptr(args[1], bytes_at)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), _build


@intrinsic
def _ask(_typing: Any, function: Any) -> Any:
    """Return what `int function(void)` returns, by its address."""
    kind = ir.FunctionType(INT, [])

    def _build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.sext(builder.call(pointer(builder, args[0], kind), []), ir.IntType(64))

    return types.int64(types.int64), _build


@intrinsic
def _wait(_typing: Any, barrier: Any) -> Any:
    """Call `void barrier(void)` by its address."""
    kind = ir.FunctionType(ir.VoidType(), [])

    def _build(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.call(pointer(builder, args[0], kind), [])
        return context.get_dummy_value()

    return types.void(types.int64), _build


def _play(job: Any) -> None:
    number = _ask(job.number) if job.number else 0
    entries = array_at(job.entries, job.num_entries, ENTRY)
    for i in range(job.num_entries):
        entry = entries[i]
        if entry.waits and job.barrier:
            _wait(job.barrier)
        if number < entry.num_threads:
            _call(entry.function, entry.record)


PLAY = Kernel(_play, JOB)
"""Call kernels in order; every thread of a team must do so, once."""
