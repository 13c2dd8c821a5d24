"""The loop of a process that `peers.py` times. Standard library only: each engine's own Python runs it.

The first argument is the work as JSON. When the engine is ready, a line {"ready": true} is printed; then each line
{"prompts": [[token id]], "num_output_tokens": n} on standard input is answered with {"seconds": s}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Generate = Callable[[list[list[int]], int], Sequence[int]]
"""Completes prompts of token ids greedily with so many tokens each; returns how many tokens each really got."""


def serve(make: Callable[[dict[str, Any]], Generate]) -> None:
    """Make the engine and answer until standard input ends.

    Args:
        make: from the work to the engine; imports the engine itself, so that its output cannot get between answers.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    generate = make(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        counts = generate(request["prompts"], request["num_output_tokens"])
        seconds = time.perf_counter() - start
        expected = [request["num_output_tokens"]] * len(request["prompts"])
        if list(counts) != expected:
            raise SystemExit(f"the engine made {list(counts)} tokens where {expected} were asked for")
        print(json.dumps({"seconds": seconds}), file=answers, flush=True)
