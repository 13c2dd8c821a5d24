"""A real `girih serve` process for tests: started on a free port, waited for, watched, ended by the signals of life.

with ServerProcess(tiny_llama(tmp_path), folder=tmp_path) as server:
    httpx.post(f"{server.url}/v1/completions", json={"prompt": "the dog"})
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import httpx
from toy_worker import is_running

START_TIMEOUT_S = 200.0  # on a machine where nothing is compiled yet
LOCAL = ("--dtype", "float32", "--kv-cache-memory", "2MiB", "--max-num-seqs", "16")
"""The engine's options that fit a tiny model."""

PAGES_IN_USE = re.compile(r'girih:pages\{.*state="referenced".*\} (\S+)')


def poll(condition: Any, timeout_s: float = 20.0, what: str = "") -> Any:
    """Call until the result is true, and return that; fail when time is up."""
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what or condition}"
        time.sleep(0.02)
    return result


class ServerProcess:
    """One server and its engine. Leaving the `with` ends both, and checks that nothing is left.

    Args:
        model: a directory.
        folder: for the log.
        *options: of the command line, after those in `LOCAL`.
        environment: variables beside our own.
        wait: until requests can come.
        is_calm: whether no stack trace may be in the log: a failed step has one.
    """

    def __init__(
        self,
        model: Path,
        *options: str,
        folder: Path,
        environment: dict[str, str] | None = None,
        wait: bool = True,
        is_calm: bool = True,
    ):
        self._is_calm = is_calm
        number = len(list(folder.glob("server-*.log")))
        self.log_file = folder / f"server-{number}.log"
        command = [sys.executable, "-m", "girih.cli.main", "serve", str(model), "--port", "0", *LOCAL, *options]
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **(environment or {})}, stdin=subprocess.DEVNULL
            )
        self._seen_engines: set[int] = set()
        if wait:
            try:
                self.wait_until_up()
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def log(self) -> str:
        """What server and engine have written."""
        return self.log_file.read_text(errors="replace")

    @property
    def pid(self) -> int:
        """Of the server's process."""
        return self.process.pid

    @property
    def port(self) -> int:
        """As the log says."""
        return int(re.search(r"is served at http://\S+:(\d+)/v1", self.log)[1])  # type: ignore[index]

    @property
    def url(self) -> str:
        """Without a path."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine_pid(self) -> int:
        """Of the engine's process, as the system says."""
        (pid,) = poll(lambda: children(self.pid), what="an engine")
        self._seen_engines.add(pid)
        return pid

    def wait_until_up(self) -> None:
        """Wait until /health says 200."""

        def is_up() -> bool:
            assert self.process.poll() is None, self.log[-3000:]
            return "is served at" in self.log and self.health() == 200

        poll(is_up, START_TIMEOUT_S, "the server is up")
        assert self.engine_pid

    def health(self) -> int:
        """Return the status of /health, 0 if nobody answers."""
        try:
            return httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code
        except httpx.HTTPError:
            return 0

    def metrics(self, **headers: str) -> str:
        """Return the text of /metrics."""
        answer = httpx.get(f"{self.url}/metrics", headers=headers, timeout=10, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer.text

    def metric(self, name: str) -> float:
        """Return the sum of the samples of one metric."""
        samples = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", self.metrics(), re.MULTILINE)
        assert samples, f"there is no {name}"
        return sum(map(float, samples))

    def pages_in_use(self) -> int:
        """Return the pages that requests hold."""
        return sum(int(float(value)) for value in PAGES_IN_USE.findall(self.metrics()))

    def wait_until_idle(self) -> None:
        """Wait until no request holds a page, waits or runs."""
        poll(lambda: self.pages_in_use() == 0, what="all pages are free")
        assert self.metric("vllm:num_requests_running") == self.metric("vllm:num_requests_waiting") == 0

    def memory_bytes(self) -> int:
        """Return the resident memory of both processes."""
        return sum(resident_bytes(pid) for pid in (self.pid, self.engine_pid))

    def signal(self, number: int) -> None:
        """Send a signal to the server."""
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 30.0) -> int:
        """Wait for the end; returns the exit code."""
        return self.process.wait(timeout_s)

    def close(self) -> None:
        """End the server if it still runs; no engine may outlive it."""
        if self.process.poll() is None:
            self._seen_engines |= set(children(self.pid))
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGTERM)
            try:
                self.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.wait()
        poll(lambda: not any(map(is_running, self._seen_engines)), what="the engine has ended")
        assert not self._is_calm or "Traceback" not in self.log, self.log[-3000:]


def children(pid: int) -> list[int]:
    """Return the processes that any thread of a process has started."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
