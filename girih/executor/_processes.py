"""A worker's process as its parent sees it: start it, hear of its end, end it.

A new interpreter is started, never a fork of this process, whose threads a child would lack. It runs
`_worker_process.py` and gets all it needs on its command line; the program's own main module is not imported.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from girih.executor._ring import Ring, RingReader
from girih.executor._served import package_paths

logger = logging.getLogger(__name__)

_BOOT = (
    "import json, sys; setup = json.loads(sys.argv[1]); sys.path[:] = setup.pop('sys_path'); "
    "from girih.executor._worker_process import main; main(**setup)"
)


class WorkerProcess:
    """One worker's process. The process gets SIGKILL when the thread that makes this object ends.

    Args:
        rank: of the worker.
        commands: its end of the ring from this process.
        answers: the ring to this process.
        extra_descriptors: what else the process needs, under the same numbers.

    Raises:
        OSError: the system starts no more processes.
    """

    def __init__(self, rank: int, commands: Ring, answers: Ring, extra_descriptors: Sequence[int]):
        self.rank = rank
        self.answers = RingReader(answers)
        setup = {
            "sys_path": [str(folder) for folder in sys.path],
            "package_paths": package_paths(),
            "rank": rank,
            "parent_pid": os.getpid(),
            "log_level": logging.getLogger().getEffectiveLevel(),
            "commands": (commands.memory, commands.ready, commands.space),
            "answers": (answers.memory, answers.ready, answers.space),
        }
        self._popen = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(setup), f"girih-worker-{rank}"],  # the last one is for `ps`
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a worker prints is no output of the program
            pass_fds=(*commands.descriptors, *answers.descriptors, *extra_descriptors),
            start_new_session=True,  # Ctrl-C in the terminal is for the parent, which shuts its workers down
        )
        self.pid = self._popen.pid
        self.end = os.pidfd_open(self.pid)
        """A descriptor that becomes readable when the process has ended."""

    def exit_code(self) -> int | None:
        """Return the exit code, or minus the number of the signal that ended the process; None while it runs."""
        poller = select.poll()
        poller.register(self.end, select.POLLIN)
        # `Popen.poll` says None of a process that has ended, too, while another thread waits for it
        return self._popen.wait() if poller.poll(0) else None

    def describe_exit(self) -> str:
        """Say how the process ended."""
        code = self._popen.returncode
        if code is None or code >= 0:
            return f"the worker of rank {self.rank} ended with exit code {code}"
        hint = ", by somebody, or by the system as memory ran out" if code == -signal.SIGKILL else ""
        return f"the worker of rank {self.rank} was killed by {signal.Signals(-code).name}{hint}"

    def is_stopped(self) -> bool:
        """Tell whether the process was stopped by a signal, such as SIGSTOP."""
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] in "Tt"  # the name before it may hold anything

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        self._popen.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; tells whether it has come."""
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Close what this process has of it."""
        self.answers.close()
        os.close(self.end)


def end_processes(processes: Sequence[WorkerProcess], timeout_s: float) -> None:
    """End the processes that run: by SIGTERM, then by SIGKILL.

    Args:
        processes: of any state.
        timeout_s: to end after each signal.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        running = [process for process in processes if process.exit_code() is None]
        for process in running:
            process.send_signal(number)
        deadline = time.monotonic() + timeout_s
        for process in running:
            process.wait(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.exit_code() is None:
            logger.error("the worker of rank %d does not end: process %d", process.rank, process.pid)
