"""What the scheduler knows of one request, and what it reports about it after a step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from girih.messages import TokenLogprobs
from girih.request import SamplingParams


@dataclass(eq=False)
class RequestState:
    """One sequence on its way through the engine: one prompt, one completion.

    It waits (`row` is None), runs (it holds `row` and pages), and may wait again after a preemption; it keeps
    its tokens throughout.

    Args:
        request_id: the engine's own unique id.
        prompt_token_ids: int32 [num_prompt_tokens], at least one.
        sampling_params: with `seed` set.
        max_output_tokens: it ends with "length" after so many.
        eos_token_ids: ids that end it silently; empty with `ignore_eos`.
        priority: smaller is more important, for policies that look at it.
        cache_salt: requests share cached prefixes only with the same salt.
        arrival: counts up by one per request; set by the scheduler.
    """

    request_id: str
    prompt_token_ids: np.ndarray
    sampling_params: SamplingParams
    max_output_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    cache_salt: str = ""
    arrival: int = 0

    row: int | None = field(default=None, init=False)
    output_token_ids: list[int] = field(default_factory=list, init=False)
    num_cached_tokens: int | None = field(default=None, init=False)
    """Prompt tokens found in the prefix cache when it first ran."""
    num_preemptions: int = field(default=0, init=False)
    num_times_passed: int = field(default=0, init=False)
    """Requests that entered before it although it was the first to wait."""
    num_prompt_logprobs: int = field(default=0, init=False)
    """Prompt tokens, from the second on, whose log probabilities were reported."""

    @property
    def num_prompt_tokens(self) -> int:
        """Return the length of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Return how many tokens are known: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def known_token_ids(self) -> np.ndarray:
        """Return prompt and output, int32 [num_tokens]."""
        if not self.output_token_ids:
            return self.prompt_token_ids
        return np.concatenate([self.prompt_token_ids, np.array(self.output_token_ids, dtype=np.int32)])

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Tell whether logits of the prompt are still to come, so that its cached prefix is of no use."""
        return (
            self.sampling_params.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt_tokens - 1
        )

    def finish_reason(self) -> tuple[str, int | None] | None:
        """Say whether the newest output token ends the request.

        Returns:
            ("stop" or "length", the explicit stop token id if one ended it), or None to go on.
        """
        token_id = self.output_token_ids[-1]
        if token_id in self.sampling_params.stop_token_ids:
            return "stop", token_id
        if token_id in self.eos_token_ids:
            return "stop", None
        if len(self.output_token_ids) >= self.max_output_tokens:
            return "length", None
        return None


@dataclass(slots=True)
class RequestUpdate:
    """What became known of one request in one step.

    Args:
        request_id: the engine's id.
        token_ids: the new output tokens.
        logprobs: of each new token, if asked for.
        prompt_logprobs: of the next prompt tokens in order, if asked for.
        num_cached_tokens: prompt tokens that came from the prefix cache.
        finish_reason: None while it runs; "stop", "length", "abort" or "error".
        stop_reason: the explicit stop token id that ended it.
        error: why it ended, with the reason "error".
    """

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: TokenLogprobs | None = None
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
