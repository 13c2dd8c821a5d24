"""What the scheduler knows of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from girih.request import SamplingParams

NO_TOKENS = np.zeros(0, dtype=np.int32)


@dataclass(eq=False)
class RequestState:
    """One sequence on its way through the engine: one prompt, one completion.

    It waits (`row` is None), runs (it holds `row` and pages), and may wait again after a preemption; it keeps
    its tokens throughout. While it runs, what changes in every step is kept for all rows together, in `RunningRows`.

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
    output_token_ids: np.ndarray = field(default_factory=lambda: NO_TOKENS, init=False)
    """int32 [n]; as of when it last entered or left a row."""
    num_cached_tokens: int | None = field(default=None, init=False)
    """Prompt tokens found in the prefix cache when it first ran."""
    num_preemptions: int = field(default=0, init=False)
    num_failures: int = field(default=0, init=False)
    """Steps that failed while it ran, since it last had a new token."""
    num_tokens_at_failure: int = field(default=0, init=False)
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
        """Return how many tokens were known when it last entered or left a row: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def known_token_ids(self) -> np.ndarray:
        """Return prompt and output, int32 [num_tokens]."""
        if not len(self.output_token_ids):
            return self.prompt_token_ids
        return np.concatenate([self.prompt_token_ids, self.output_token_ids])

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Tell whether logits of the prompt are still to come, so that its cached prefix is of no use."""
        return (
            self.sampling_params.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt_tokens - 1
        )

    def finish_reason(self, token_id: int, num_output_tokens: int) -> tuple[str, int | None] | None:
        """Say whether an output token ends the request.

        Args:
            token_id: the newest output token.
            num_output_tokens: with it.

        Returns:
            ("stop" or "length", the explicit stop token id if one ended it), or None to go on.
        """
        if token_id in self.sampling_params.stop_token_ids:
            return "stop", token_id
        if token_id in self.eos_token_ids:
            return "stop", None
        if num_output_tokens >= self.max_output_tokens:
            return "length", None
        return None
