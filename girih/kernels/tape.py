"""`Tape`: calls of kernels that were recorded, to be played again by the same threads without Python between them.

    recorded     one after the other: Python writes a record, starts threads, waits for them
    played       one start: |qkv|  wait  |heads, write, lay out|  wait  |attend|  wait  |out|  ...

What a kernel is told stays as it was: addresses, sizes, counters that begin at zero. So whoever plays a tape keeps all
memory that was used, and writes into it what is new.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from girih.kernels._player import ENTRY, JOB, PLAY
from girih.kernels.threads import Call, call_team, counted, team

CACHE_LINE = 8
"""Numbers of 8 bytes."""


class Tape:
    """Some calls, in order.

    Args:
        calls: as `girih.kernels.threads.recorded_calls` lists them.
    """

    def __init__(self, calls: Sequence[Call]):
        records = [counted(call.record) if isinstance(call.record, tuple) else () for call in calls]
        # no two of them share a line of the processor's cache
        starts = np.cumsum([0, *(-(-len(record) // CACHE_LINE) * CACHE_LINE for record in records)])
        self._memory = np.zeros(int(starts[-1]), np.int64)
        at, words = int(self._memory.ctypes.data), self._memory.itemsize
        self._entries = np.zeros(len(calls), ENTRY)
        alone = True  # what one thread does needs no wait for itself
        for i, (call, record, start) in enumerate(zip(calls, records, starts, strict=False)):
            address = at + int(start) * words
            if isinstance(call.record, int):
                address = call.record
            else:
                self._memory[start : start + len(record)] = record
                self._memory[start + len(record) - 2] = address + (len(record) - 1) * words
            waits = not (alone and call.num_threads == 1)
            alone = call.num_threads == 1
            self._entries[i] = call.kernel.address, address, call.num_threads, waits
        self._entries["waits"][:1] = 0
        self._pristine = self._memory.copy()
        self._num_threads = max((call.num_threads for call in calls), default=1) if team().barrier else 1
        fields = (self._entries.ctypes.data, len(calls), *team())
        self._job = np.array([fields], np.int64).view(JOB)
        self._address: int = self._job.ctypes.data

    def play(self) -> None:
        """Call all of them again; not from two Python threads at once."""
        self._memory[:] = self._pristine
        call_team(PLAY, self._address, self._num_threads)


def get_ready() -> None:
    """Compile, or load, what plays tapes."""
    assert PLAY.address
