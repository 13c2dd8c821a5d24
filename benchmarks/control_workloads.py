"""Which workload runs on which layers, and the requests of the scheduler's workload. Shared with vLLM's Python.

Standard library and numpy only.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from op_streams import QUICK_STREAMS, STREAMS, VOCAB_SIZE, OpStream

KINDS = {
    "W1": "plain",
    "W2": "hybrid",
    "W2L": "hybrid",
    "W3": "plain",
    "W3H": "hybrid",
    "W4": "plain",
    "sched": "plain",
    "sched-hybrid": "hybrid",
}
"""Workload -> "plain": Llama-3-8B, 32 layers of full attention; "hybrid": Gemma-3-12B, 8 full and 40 of window 1024."""


def workload(name: str, quick: bool) -> OpStream:
    """Return the operations of W1..W4; W3H is W3 for the hybrid."""
    return (QUICK_STREAMS if quick else STREAMS)[name.removesuffix("H")]()


@dataclass(frozen=True)
class SchedulerWorkload:
    """All requests arrive at once, are prefilled in chunks, and decode together to the same length."""

    num_requests: int = 256
    prompt_tokens: int = 512
    output_tokens: int = 513
    max_num_batched_tokens: int = 8192

    @property
    def max_model_len(self) -> int:
        """Return the longest sequence in tokens."""
        return self.prompt_tokens + self.output_tokens + 63

    @property
    def pool_tokens(self) -> int:
        """Return how many tokens of every layer the pool holds."""
        return self.num_requests * (self.prompt_tokens + self.output_tokens) + 4096

    def num_output(self, quick: bool) -> int:
        """Return the tokens that each request samples."""
        return 65 if quick else self.output_tokens

    def prompts(self) -> list[list[int]]:
        """Return the prompts."""
        rng = random.Random(1)
        return [[rng.randrange(VOCAB_SIZE) for _ in range(self.prompt_tokens)] for _ in range(self.num_requests)]

    def sampled(self) -> Iterator[int]:
        """Yield sampled tokens."""
        rng = random.Random(5)
        while True:
            yield rng.randrange(VOCAB_SIZE)


SCHED = SchedulerWorkload()
