"""Starts of fresh processes, timed from outside; the other half is `_first_token.py`, which each process runs."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from girih.cli._bench_work import Figures, Progress, spread
from girih.config import EngineConfig
from girih.errors import ConfigError

START_INTERPRETER = "start python"
"""The phase before the first line of the new process' own."""


def measure_startup(config: EngineConfig, rounds: int, cold: bool, progress: Progress) -> Figures:
    """Start fresh processes one after another.

    Args:
        config: of the engine that each starts.
        rounds: how many processes.
        cold: before them, one more that finds nothing compiled.
        progress: told of every start.

    Raises:
        ConfigError: an engine did not come up; with its own message.
    """
    first = None
    if cold:
        progress("first start, which compiles", 0, 1)
        with tempfile.TemporaryDirectory(prefix="girih-bench-") as directory:
            first = _timed_start(config, {"NUMBA_CACHE_DIR": directory})
    found = []
    for i in range(rounds):
        progress("starts", i, rounds)
        found.append(_timed_start(config, {}))
    progress("starts", rounds, rounds)
    names = dict.fromkeys(name for entry in found for name in entry["phases_s"])
    return {
        "rounds": found,
        "first_start": first,
        "total_s": spread([entry["total_s"] for entry in found]),
        "phases_s": {name: statistics.median(entry["phases_s"].get(name, 0.0) for entry in found) for name in names},
    }


def _timed_start(config: EngineConfig, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the phases of one process, which together are the time until its first token was there."""
    command = [sys.executable, "-m", "girih.cli._first_token", json.dumps(vars(config))]
    start = time.monotonic()
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"the process ended with exit code {done.returncode}"]
        raise ConfigError(lines[-1].removeprefix("girih: "))
    answer = json.loads(done.stdout.splitlines()[-1])
    phases_s = {START_INTERPRETER: answer["began"] - start, **answer["phases_s"]}
    return {"total_s": sum(phases_s.values()), "phases_s": phases_s}
