"""A worker for tests of executors with processes: no model, no torch; its methods do what may go wrong."""

import contextlib
import logging
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from girih.errors import CapacityError


class ToyWorker:
    """Made in its process with rank and rendezvous."""

    def __init__(self, rank, rendezvous):
        self.rank, self.rendezvous = rank, rendezvous
        self.steps = []

    def where(self):
        return self.rank, os.getpid(), os.getppid()

    def meeting_place(self):
        return self.rendezvous

    def seen_steps(self):
        return self.steps

    def loaded(self, *names):
        return [name for name in names if name in sys.modules]

    def environment(self, name):
        return os.environ.get(name)

    def add(self, *args):
        return sum(args)

    def same(self, value):
        return value

    def total(self, array):
        return int(array.sum()), array.flags.writeable, array.flags.aligned

    def ones(self, num_bytes):
        return np.ones(num_bytes, np.uint8)

    def fail(self, rank):
        if self.rank == rank:
            raise ValueError(f"x of {rank}")
        return self.rank

    def refuse(self):
        raise CapacityError("too big", need_bytes=2, have_bytes=1, fitting_tokens=None)

    def give_lambda(self):
        return lambda: None

    def log(self, text):
        logging.getLogger("toy").warning(text)
        print("printed", text, flush=True)

    def sleep(self, seconds, rank=None):
        if rank in (None, self.rank):
            time.sleep(seconds)

    def exit(self, code, rank):
        if self.rank == rank:
            os._exit(code)
        time.sleep(30)

    def miss(self, rank):
        """Of two workers one ends, and the other notices first."""
        if self.rank == rank:
            time.sleep(0.2)
            os._exit(4)
        raise ConnectionError("the other one has hung up")

    def crash(self, rank):
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(30)

    def execute_model(self, step):
        """Do as told, then give (rank, step); a step is whatever a test likes."""
        self.steps.append(step)
        if isinstance(step, dict) and step.get("rank", self.rank) == self.rank:
            time.sleep(step.get("sleep", 0))
            if "raise" in step:
                raise ValueError(step["raise"])
        return self.rank, step

    def shutdown(self):
        logging.getLogger("toy").warning("released")


class BrokenToyWorker(ToyWorker):
    """Cannot be made on rank 1."""

    def __init__(self, rank, rendezvous):
        super().__init__(rank, rendezvous)
        if rank == 1:
            raise OSError("no such device")


class SlowToyWorker(ToyWorker):
    """Takes a minute to be made."""

    def __init__(self, rank, rendezvous):
        super().__init__(rank, rendezvous)
        time.sleep(60)


class UnreleasableToyWorker(ToyWorker):
    """Fails when it is released."""

    def shutdown(self):
        raise ValueError("cannot let go")


class StubbornToyWorker(ToyWorker):
    """Ends by SIGKILL only."""

    def __init__(self, rank, rendezvous):
        super().__init__(rank, rendezvous)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def is_running(pid):
    """Tell whether a process exists and is no zombie."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] not in "ZX"
    return False


def named_memory(pid):
    """Return what a process has of /dev/shm, which others could leave behind for ever; other programs use it too."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    descriptors = [os.path.realpath(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    return [place for place in maps + descriptors if "/dev/shm/" in place and not place.endswith("(deleted)")]
