"""Streams of cache operations, the same for every engine: seeded, and without any notion of blocks or hashes.

An operation is a tuple whose first field says what it is:

    (TICK,)                     a scheduler step begins
    (ADMIT, rid, token_ids)     a request arrives; the longest cached prefix is looked up
    (PREFILL, rid, max_tokens)  compute that many more tokens of its prompt, or what is left of it
    (STEP, rid, token_id)       this token was sampled; append it and make room for one more
    (FREE, rid)                 the request is finished

Tokens are lists of ints, which is what a tokenizer hands over. Standard library and numpy only, so that another
engine's Python can run this file.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

TICK, ADMIT, PREFILL, STEP, FREE = range(5)
STEP_BATCH = 5
"""(STEP_BATCH, rids int64 [n], token_ids int32 [n]): consecutive STEPs as one operation; see `batch_steps`."""

VOCAB_SIZE = 128_256

Op = tuple[Any, ...]


@dataclass(frozen=True)
class OpStream:
    """One workload.

    Args:
        name: e.g. "W1".
        ops: the operations in order.
        pool_tokens: tokens that the pool holds when every layer keeps every token.
        max_model_len: longest sequence in tokens.
        max_num_seqs: requests that are held at once.
        num_row_steps: (request, decode step) pairs; 0 for a workload without decoding.
    """

    name: str
    ops: list[Op] = field(repr=False)
    pool_tokens: int
    max_model_len: int
    max_num_seqs: int
    num_row_steps: int

    def digest(self) -> str:
        """Return a hash of every operation and token, to show that two engines ran the same."""
        opcodes = np.array([op[0] for op in self.ops], dtype=np.int32)
        rids = np.array([op[1] if len(op) > 1 else -1 for op in self.ops], dtype=np.int32)
        args = np.array([op[2] if op[0] in (PREFILL, STEP) else 0 for op in self.ops], dtype=np.int64)
        prompts = [op[2] if op[0] == ADMIT else () for op in self.ops]
        ends = np.cumsum([0, *(len(prompt) for prompt in prompts)], dtype=np.int64)
        tokens = np.array([token for prompt in prompts for token in prompt], dtype=np.int32)
        parts = (opcodes, rids, args, ends, tokens)
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()[:16]


def lockstep_decode(
    num_requests: int = 256, prompt_tokens: int = 512, decode_steps: int = 512, seed: int = 1, name: str = "W1"
) -> OpStream:
    """W1, W2: all requests are admitted at once, then decode together. W2L: prompts that outgrow a window of 1024."""
    rng = random.Random(seed)
    ops: list[Op] = [(TICK,)]
    for rid in range(num_requests):
        ops += [(ADMIT, rid, _tokens(rng, prompt_tokens)), (PREFILL, rid, prompt_tokens)]
    for _ in range(decode_steps):
        ops.append((TICK,))
        ops += [(STEP, rid, rng.randrange(VOCAB_SIZE)) for rid in range(num_requests)]
    ops += [(FREE, rid) for rid in range(num_requests)]
    length = prompt_tokens + decode_steps
    return OpStream(
        name, ops, num_requests * length + 4096, length + 64, num_requests, num_row_steps=num_requests * decode_steps
    )


def shared_prefixes(
    num_requests: int = 2000,
    num_prefixes: int = 64,
    prefix_tokens: int = 2048,
    suffix_tokens: int = 256,
    decode_steps: int = 64,
    ticks_per_arrival: int = 2,
    pool_tokens: int = 98_304,
    seed: int = 3,
    name: str = "W3",
) -> OpStream:
    """W3: each request is one of a few long prefixes and a suffix of its own; not all prefixes fit in the pool."""
    rng = random.Random(seed)
    prefixes = [_tokens(rng, prefix_tokens) for _ in range(num_prefixes)]
    ops: list[Op] = []
    steps_left: dict[int, int] = {}
    arrived = tick = 0
    while arrived < num_requests or steps_left:
        ops.append((TICK,))
        for rid in steps_left:
            ops.append((STEP, rid, rng.randrange(VOCAB_SIZE)))
            steps_left[rid] -= 1
        for rid in [rid for rid, left in steps_left.items() if left == 0]:
            ops.append((FREE, rid))
            del steps_left[rid]
        if arrived < num_requests and tick % ticks_per_arrival == 0:
            prefix = prefixes[rng.randrange(num_prefixes)]
            prompt = prefix + _tokens(rng, suffix_tokens)
            ops += [(ADMIT, arrived, prompt), (PREFILL, arrived, len(prompt))]
            steps_left[arrived] = decode_steps
            arrived += 1
        tick += 1
    return OpStream(
        name,
        ops,
        pool_tokens,
        prefix_tokens + suffix_tokens + decode_steps + 64,
        decode_steps // ticks_per_arrival + 1,
        num_row_steps=num_requests * decode_steps,
    )


def long_context(
    num_requests: int = 8, prompt_tokens: int = 131_072, chunk_tokens: int = 8192, seed: int = 4, name: str = "W4"
) -> OpStream:
    """W4: long prompts computed chunk by chunk, in turns; all are freed, and the same prompts come once more."""
    rng = random.Random(seed)
    prompts = [_tokens(rng, prompt_tokens) for _ in range(num_requests)]
    ops: list[Op] = []
    for first in (0, num_requests):
        rids = range(first, first + num_requests)
        ops.append((TICK,))
        ops += [(ADMIT, rid, prompt) for rid, prompt in zip(rids, prompts, strict=True)]
        for _ in range(-(-prompt_tokens // chunk_tokens)):
            for rid in rids:
                ops += [(TICK,), (PREFILL, rid, chunk_tokens)]
        ops += [(FREE, rid) for rid in rids]
    return OpStream(name, ops, num_requests * prompt_tokens + 4096, prompt_tokens + 64, num_requests, num_row_steps=0)


STREAMS: dict[str, Callable[[], OpStream]] = {
    "W1": lockstep_decode,
    "W2": lambda: lockstep_decode(name="W2"),
    "W2L": lambda: lockstep_decode(prompt_tokens=2048, name="W2L"),
    "W3": shared_prefixes,
    "W4": long_context,
}
"""The full workloads, by name."""

QUICK_STREAMS: dict[str, Callable[[], OpStream]] = {
    "W1": lambda: lockstep_decode(decode_steps=64),
    "W2": lambda: lockstep_decode(decode_steps=64, name="W2"),
    "W2L": lambda: lockstep_decode(64, prompt_tokens=2048, decode_steps=64, name="W2L"),
    "W3": lambda: shared_prefixes(num_requests=200, num_prefixes=16, pool_tokens=45_056),
    "W4": lambda: long_context(prompt_tokens=16_384, chunk_tokens=2048),
}
"""Smaller ones of the same shape, for CI. Their times are not what the marks are about."""


def batch_steps(ops: Iterable[Op]) -> list[Op]:
    """Merge each run of STEPs into one STEP_BATCH, for an engine that decodes a batch with one call."""
    merged: list[Op] = []
    rids: list[int] = []
    token_ids: list[int] = []
    for op in [*ops, (None,)]:
        if op[0] == STEP:
            rids.append(op[1])
            token_ids.append(op[2])
            continue
        if rids:
            merged.append((STEP_BATCH, np.array(rids, dtype=np.int64), np.array(token_ids, dtype=np.int32)))
            rids, token_ids = [], []
        merged.append(op)
    return merged[:-1]


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]
