"""Two engines that do the same work in turns, so that a machine's changes of speed meet both.

Each pair of rounds gives one ratio; what counts is the median of the ratios. Who begins changes from pair to pair.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from girih import LLM, SamplingParams

PROMPT_TOKENS = 8
MAX_MODEL_LEN = 256


@contextmanager
def engine_pair(model: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[LLM, LLM]]:
    """Make two engines and shut them down in the end.

    Args:
        model: of both.
        first: options of the first engine.
        second: options of the second one.
    """
    common = {"max_model_len": MAX_MODEL_LEN, "kv_cache_memory": "1GiB", "enable_prefix_caching": False}
    with LLM(model, **common, **first) as one, LLM(model, **common, **second) as other:
        yield one, other


def paired_seconds(
    pair: tuple[LLM, LLM], *, num_sequences: int, num_output_tokens: int, rounds: int
) -> list[tuple[float, float]]:
    """Generate the same in turns; the first round of each engine does not count.

    Args:
        pair: the engines.
        num_sequences: at once.
        num_output_tokens: of each sequence.
        rounds: pairs of rounds.

    Returns:
        The seconds of each pair of rounds, in the order of `pair`.
    """
    rng = random.Random(0)
    prompts = [[rng.randint(100, 300) for _ in range(PROMPT_TOKENS)] for _ in range(num_sequences)]
    for llm in pair:
        _seconds(llm, prompts, num_output_tokens)
    found = []
    for i in range(rounds):
        seconds = {place: _seconds(pair[place], prompts, num_output_tokens) for place in ((0, 1), (1, 0))[i % 2]}
        found.append((seconds[0], seconds[1]))
    return found


def _seconds(llm: LLM, prompts: Sequence[list[int]], num_output_tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=num_output_tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    assert all(len(output.outputs[0].token_ids) == num_output_tokens for output in outputs)
    return seconds
