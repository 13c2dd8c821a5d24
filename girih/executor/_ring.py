"""A stream of bytes from one process to several through shared memory: written once, read by each.

    memory   | read by all | written, not yet read | free |        a ring; messages of any size go through it in parts
    ready    one eventfd per reader: the writer adds the bytes that it has written
    space    one eventfd per reader: the reader adds the bytes that it has read

There are no shared counters. The eventfds carry the numbers, wake who sleeps, and order the memory accesses on
every processor. The memory is anonymous (memfd): it has no name, so nothing is left behind however processes end.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from girih.executor._frames import HEADER, Buffer, Message

RING_BYTES = 4 << 20


def make_memory(name: str) -> int:
    """Return the descriptor of memory that ends with its last user; a name is for people who look into /proc."""
    return _not_standard(os.memfd_create(name))


def make_event() -> int:
    """Return the descriptor of a counter that wakes who polls it."""
    return _not_standard(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))


def _not_standard(descriptor: int) -> int:
    """Move a descriptor of a program without standard input or output: in its children these are other files."""
    if descriptor > 2:
        return descriptor
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Ring:
    """The descriptors of a ring, as one of its processes needs them.

    Args:
        memory: of the shared memory.
        ready: one eventfd per reader.
        space: one eventfd per reader.
    """

    memory: int
    ready: tuple[int, ...]
    space: tuple[int, ...]

    @staticmethod
    def make(num_readers: int, num_bytes: int = RING_BYTES) -> Ring:
        """Make a ring; its descriptors are this process' until `close`."""
        memory = make_memory("girih-ring")
        os.ftruncate(memory, num_bytes)
        ready, space = ([make_event() for _ in range(num_readers)] for _ in range(2))
        return Ring(memory, tuple(ready), tuple(space))

    def of_reader(self, reader: int) -> Ring:
        """Return what one reader needs."""
        return Ring(self.memory, (self.ready[reader],), (self.space[reader],))

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Return all descriptors."""
        return (self.memory, *self.ready, *self.space)

    def close(self) -> None:
        """Close the descriptors; both ends must be closed before."""
        for descriptor in self.descriptors:
            os.close(descriptor)


class RingWriter:
    """The end that writes. One thread at a time.

    Args:
        ring: with the descriptors of all readers.
        stop: a descriptor that becomes readable when nobody will read any more; None if there is none.
    """

    def __init__(self, ring: Ring, stop: int | None = None):
        self._ring = ring
        self._stop = stop
        self._mmap = mmap.mmap(ring.memory, 0)
        self._memory = memoryview(self._mmap)
        self._free = [len(self._memory)] * len(ring.ready)
        self._position = 0
        self._unannounced = 0

    def write(self, parts: Sequence[Buffer], timeout_s: float) -> None:
        """Write one message; it may be larger than the ring, then this waits for the readers.

        Args:
            parts: the bytes, in order.
            timeout_s: the longest wait for readers, all in all.

        Raises:
            TimeoutError: a reader did not read in time; `lagging` says which. The stream is of no use any more.
            BrokenPipeError: the stop descriptor became readable.
        """
        deadline = time.monotonic() + timeout_s
        for part in parts:
            rest = memoryview(part).cast("B")
            while rest:
                room = min(len(rest), len(self._memory) - self._position, *self._free)
                if not room:
                    self._announce()
                    self._wait_for_space(deadline)
                    continue
                self._memory[self._position : self._position + room] = rest[:room]
                self._position = (self._position + room) % len(self._memory)
                self._free = [free - room for free in self._free]
                self._unannounced += room
                rest = rest[room:]
        self._announce()

    def lagging(self) -> list[int]:
        """Return the readers that have left no room in the ring."""
        return [reader for reader, free in enumerate(self._free) if not free]

    def close(self) -> None:
        """Give the mapping back; the descriptors belong to the ring."""
        self._memory.release()
        self._mmap.close()

    def _announce(self) -> None:
        if self._unannounced:
            for ready in self._ring.ready:
                os.eventfd_write(ready, self._unannounced)
            self._unannounced = 0

    def _wait_for_space(self, deadline: float) -> None:
        while lagging := self.lagging():
            poller = select.poll()
            for reader in lagging:
                poller.register(self._ring.space[reader], select.POLLIN)
            if self._stop is not None:
                poller.register(self._stop, select.POLLIN)
            events = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not events:
                raise TimeoutError
            if any(descriptor == self._stop for descriptor, _ in events):
                raise BrokenPipeError
            for reader in lagging:
                self._free[reader] += _take(self._ring.space[reader])


class RingReader:
    """The end of one reader. One thread at a time.

    Args:
        ring: with the descriptors of this reader.
    """

    def __init__(self, ring: Ring):
        (self.ready,), (self._space,) = ring.ready, ring.space
        self._mmap = mmap.mmap(ring.memory, 0)
        self._memory = memoryview(self._mmap)
        self._position = 0
        self._read = 0  # bytes that the writer has not been told of
        self._start(None)
        self._received: deque[Message] = deque()
        self._poller = select.poll()
        self._poller.register(self.ready, select.POLLIN)

    def take(self) -> list[Message]:
        """Return the messages that are complete by now, without waiting."""
        messages = []
        available = _take(self.ready)
        while available:
            room = min(available, len(self._target) - self._filled, len(self._memory) - self._position)
            self._target[self._filled : self._filled + room] = self._memory[self._position : self._position + room]
            self._position = (self._position + room) % len(self._memory)
            self._filled += room
            self._read += room
            available -= room
            if self._filled < len(self._target):
                continue
            if self._header is None:
                self._start(self._target)
            else:
                messages.append(Message(self._header, self._target))
                self._start(None)
        # told only now and then, which saves a call per message; a full ring is always more than this
        if self._read >= len(self._memory) // 4:
            os.eventfd_write(self._space, self._read)
            self._read = 0
        return messages

    def receive(self) -> Message:
        """Return the next message; waits for it without end, asleep."""
        while not self._received:
            self._poller.poll()
            self._received.extend(self.take())
        return self._received.popleft()

    def close(self) -> None:
        """Give the mapping back; the descriptors belong to the ring."""
        self._memory.release()
        self._mmap.close()

    def _start(self, header: bytearray | None) -> None:
        """Begin with a header, or with the body behind one."""
        self._header: bytearray | None = header
        self._target = bytearray(HEADER.size if header is None else Message.body_bytes(header))
        self._filled = 0


def _take(descriptor: int) -> int:
    """Take what was added to an eventfd; 0 if nothing was."""
    try:
        return os.eventfd_read(descriptor)
    except BlockingIOError:
        return 0
