"""An engine in a process of its own, timed in turns with others; while it is not its turn it stands still."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENGINES = Path(__file__).parent / "peer_engines"
LINES_OF_ERROR = 15


@dataclass(frozen=True)
class Variant:
    """One engine with its options.

    Args:
        engine: a file run_<engine>.py of `peer_engines`.
        options: of the engine; what they mean is its own affair.
        environment: variables that its process gets.
    """

    engine: str
    options: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)


class PeerProcess:
    """Starts an engine, waits until it is ready, and stops it.

    Args:
        name: of the variant, for messages.
        variant: what to start.
        python: that has the engine.
        work: what the engine must know of the work; JSON.
    """

    def __init__(self, name: str, variant: Variant, python: str, work: Mapping[str, Any]):
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by `close`
        command = [python, str(ENGINES / f"run_{variant.engine}.py"), json.dumps({**work, "options": variant.options})]
        start = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **variant.environment},
            start_new_session=True,  # a group of its own, with the processes that the engine starts
        )
        try:
            self._read()
        except BaseException:
            self.close()
            raise
        self.startup_s = time.perf_counter() - start
        self._signal(signal.SIGSTOP)

    def seconds(self, rounds: Sequence[list[list[int]]], num_output_tokens: int, warm_up_tokens: int) -> list[float]:
        """Take a turn: after a short round that does not count, complete each round's prompts.

        Args:
            rounds: prompts of token ids; the first ones are those of the warm-up.
            num_output_tokens: of each prompt.
            warm_up_tokens: of each prompt in the warm-up.

        Returns:
            Seconds of each round but the first.
        """
        self._signal(signal.SIGCONT)
        warm_up, *measured = rounds
        self._ask(warm_up, warm_up_tokens)
        found = [self._ask(prompts, num_output_tokens) for prompts in measured]
        self._signal(signal.SIGSTOP)
        return found

    def close(self) -> None:
        """End the process and all that it started."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with suppress(BrokenPipeError):  # a request that was never read
                    stream.close()

    def _ask(self, prompts: list[list[int]], num_output_tokens: int) -> float:
        assert self._process.stdin is not None
        line = json.dumps({"prompts": prompts, "num_output_tokens": num_output_tokens})
        with suppress(BrokenPipeError):  # why it ended is read below
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        return self._read()["seconds"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        self._errors.seek(0)
        last = "".join(self._errors.readlines()[-LINES_OF_ERROR:])
        raise SystemExit(f"{self.name} ended with exit code {self._process.wait()}:\n{last}")

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(self._process.pid, number)
