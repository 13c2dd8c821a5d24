"""Request streams with something to reuse, for comparing what caches keep.

All lengths are such that all but the last token of a request fill whole blocks, so that no cache gains or loses by how
it treats a part of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from churn import conversation_lengths

BLOCK_TOKENS = 16
VOCAB_SIZE = 128_256
LONGEST_TURN = 512
"""Messages and answers of chats are cut to this many tokens."""


@dataclass(frozen=True)
class TracedRequest:
    """One request and its answer.

    Args:
        token_ids: int32 [n]; prompt and answer; n - 1 is a multiple of the block size.
        num_prompt: how many of them are the prompt.
    """

    token_ids: np.ndarray
    num_prompt: int


def zipf_prefixes(num_requests: int, num_prefixes: int = 64, seed: int = 0) -> Iterator[TracedRequest]:
    """Yield requests of a system prompt (512 to 8,192 tokens, popularity 1 / rank), a message and an answer."""
    rng = np.random.default_rng(seed)
    lengths = rng.choice([512, 1024, 2048, 4096, 8192], num_prefixes)
    prefixes = [_tokens(rng, length) for length in lengths]
    popularity = 1 / np.arange(1, num_prefixes + 1)
    for _ in range(num_requests):
        prefix = prefixes[rng.choice(num_prefixes, p=popularity / popularity.sum())]
        yield _request(rng, prefix, num_message=256, num_answer=33)


def chats(
    num_requests: int, num_open: int = 120, num_prefixes: int = 16, mean_turns: float = 6, seed: int = 0
) -> Iterator[TracedRequest]:
    """Yield turns of chats that are open at the same time; each turn's prompt is all that was said before.

    A chat begins with one of a few system prompts. Messages and answers have the lengths of real conversations. The
    next turn comes from a random chat; which are likelier than others, for some people answer fast.
    """
    rng = np.random.default_rng(seed)
    lengths = np.clip(conversation_lengths(), BLOCK_TOKENS, LONGEST_TURN)
    prefixes = [_tokens(rng, int(length)) for length in rng.choice([256, 512, 1024, 2048], num_prefixes)]
    popularity = 1 / np.arange(1, num_prefixes + 1)
    speed = rng.exponential(size=num_open)
    empty = np.zeros(0, dtype=np.int32)
    history = [empty] * num_open
    for _ in range(num_requests):
        chat = int(rng.choice(num_open, p=speed / speed.sum()))
        if not len(history[chat]):
            history[chat] = prefixes[rng.choice(num_prefixes, p=popularity / popularity.sum())]
        message, answer = lengths[rng.integers(len(lengths))]
        request = _request(rng, history[chat], int(message), int(answer))
        yield request
        ends = rng.random() < 1 / mean_turns
        history[chat] = empty if ends else request.token_ids
        if ends:
            speed[chat] = rng.exponential()


def _request(rng: np.random.Generator, history: np.ndarray, num_message: int, num_answer: int) -> TracedRequest:
    num_answer += (1 - len(history) - num_message - num_answer) % BLOCK_TOKENS
    token_ids = np.concatenate([history, _tokens(rng, num_message + num_answer)])
    return TracedRequest(token_ids, len(history) + num_message)


def _tokens(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, VOCAB_SIZE, count, dtype=np.int32)


TRACES = {"prefixes": zipf_prefixes, "chats": chats}
