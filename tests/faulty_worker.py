"""Real workers of which one fails once, in a way and at a call that the test says.

monkeypatch.setattr(_remote, "MakeWorker", lambda config: MakeFaultyWorker(config, Fault(...)))
"""

import os
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from girih.config import EngineConfig
from girih.worker.worker import Worker

SPARE_BYTES = 64 << 10


@dataclass(frozen=True)
class Fault:
    """What happens to the worker of `rank` when `method` is called for the `call`-th time; once, as `mark` remembers.

    Args:
        how: "raise", "kill", "stop", or "memory": the system gives the process no more from then on.
        method: of the worker.
        mark: a file, made when it happens.
        rank: of the worker.
        call: counted from 1.
        always: it happens to every new worker, too.
    """

    how: str
    method: str
    mark: Path
    rank: int = 1
    call: int = 1
    always: bool = False

    def happen(self):
        """Let it happen to this process."""
        if self.mark.exists() and not self.always:
            return
        self.mark.touch()
        if self.how == "raise":
            raise ValueError(f"no luck in {self.method}")
        if self.how == "memory":
            now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (now + SPARE_BYTES, resource.RLIM_INFINITY))
            if self.method == "execute_model":  # a step may find all that it needs in memory that the process has
                torch.empty(2 * SPARE_BYTES, dtype=torch.uint8)
        else:
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.how])
            time.sleep(0.1)


class FaultyWorker(Worker):
    """A worker that meets a fault."""

    def __init__(self, config, rank, rendezvous, fault):
        super().__init__(config, rank, rendezvous)
        if rank == fault.rank:
            setattr(self, fault.method, self._with_fault(getattr(self, fault.method), fault))

    @staticmethod
    def _with_fault(method, fault):
        num_calls = 0

        def call(*args):
            nonlocal num_calls
            num_calls += 1
            if num_calls == fault.call:
                fault.happen()
            return method(*args)

        return call


@dataclass(frozen=True)
class MakeFaultyWorker:
    """Makes the workers, in their processes."""

    config: EngineConfig
    fault: Fault

    def __call__(self, rank, rendezvous):
        return FaultyWorker(self.config, rank, rendezvous, self.fault)
