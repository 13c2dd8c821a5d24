"""What torch does while a step is recorded (see `girih.layers.replay`): tensors are made of memory that is kept, and
whatever torch computes is noted, as it would not be computed again.

Memory of a tensor that nobody holds any more is used again: by later layers, and by the recorded steps of other numbers
of rows, as no two steps are computed at once. So all of them together need the memory of the largest.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

BLOCK_BYTES = 4096
"""Memory is kept in multiples of so many."""


class Memory:
    """Memory for tensors; that of one which nobody holds any more is for the next one."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        self.device = torch.from_numpy(np.zeros(0)).device

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor."""
        num_bytes = max(1, math.prod(shape)) * dtype.itemsize
        fitting = [i for i, block in enumerate(self._free) if block.size >= num_bytes]
        if fitting:
            block = self._free.pop(min(fitting, key=lambda i: self._free[i].size))
        else:
            block = torch.empty(-(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES, dtype=torch.uint8).numpy()
        part = block[:num_bytes]  # lives as long as any view of the tensor
        weakref.finalize(part, self._free.append, block).atexit = False
        return torch.from_numpy(part).view(dtype)[: math.prod(shape)].view(tuple(shape))


class _Watch:
    """What torch asks while a `Recording` goes on.

    It is not that class' own, as torch would then wrap it so that its compiler leaves it alone, and take a second for
    the import of the compiler.
    """

    def __init__(self, memory: Memory):
        super().__init__()
        self.foreign: str | None = None
        """An operation that computes something, or takes it from elsewhere."""
        self.remade: list[tuple[Callable[[], Sequence[torch.Tensor]], Sequence[torch.Tensor]]] = []
        self._memory, self._is_remaking = memory, False

    def remake(self, make: Callable[[], Sequence[torch.Tensor]]) -> Sequence[torch.Tensor]:
        """See `remade`."""
        self._is_remaking = True
        made = make()
        self._is_remaking = False
        self.remade.append((make, made))
        return made

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what torch is asked for, and note what it is."""
        result = func(*args, **kwargs or {})
        if self._is_remaking:
            return result
        if func in _EMPTY and result.device == self._memory.device and result.is_contiguous():
            return self._memory.empty(result.shape, result.dtype)
        if not (func.is_view and func is not _FROM_NUMPY and _same_memory(args[0], result)):
            self.foreign = self.foreign or str(func)
        return result


class Recording(_Watch, TorchDispatchMode):
    """Sees what torch does meanwhile, in this Python thread.

    Args:
        memory: for tensors that are made.
    """

    def __enter__(self) -> Recording:
        """Begin."""
        self._before, _current.recording = _current.recording, self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """End."""
        super().__exit__(*error)
        _current.recording = self._before


_EMPTY = {getattr(torch.ops.aten, name).default for name in ("empty_like", "new_empty")}
_FROM_NUMPY = torch.ops.aten.lift_fresh.default
_EMPTY.add(torch.ops.aten.empty.memory_format)


class _Current(threading.local):
    recording: Recording | None = None


_current = _Current()


def remade(make: Callable[[], Sequence[torch.Tensor]]) -> Sequence[torch.Tensor]:
    """Return tensors that torch makes of a step's positions; where the step is replayed, they are made again before.

    Args:
        make: returns as many of the same shapes each time.
    """
    recording = _current.recording
    return make() if recording is None else recording.remake(make)


def _same_memory(x: Any, result: Any) -> bool:
    """Return whether what looks like a view is one: reshape and the like may copy."""
    results = [result] if isinstance(result, torch.Tensor) else result
    at = x.untyped_storage().data_ptr()
    return all(part.untyped_storage().data_ptr() == at for part in results)
