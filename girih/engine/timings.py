"""How long requests took, and how much they were, as a front end sees them; for metrics."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class FinishedRequest:
    """One request that has ended, with all of its completions.

    Args:
        reason: why its first completion ended: "stop", "length", "abort" or "error".
        total_s: from its arrival to its end.
        queue_s: until it was let in; all of the time if it never was.
        prefill_s: from then to its first token; None without one.
        decode_s: from then to its end; None without one.
        num_prompt_tokens: of the prompt.
        num_output_tokens: of all completions.
        num_completions: asked for.
        max_tokens: asked for; None if they were left out.
    """

    reason: str
    total_s: float
    queue_s: float
    prefill_s: float | None
    decode_s: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_completions: int
    max_tokens: int | None


@dataclass
class Timings:
    """What has happened since somebody took note of it last.

    Args:
        first_token_s: from the arrival of a request to the first token of each completion.
        inter_token_s: between two tokens of a completion.
        finished: requests that have ended.
    """

    first_token_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)
    finished: list[FinishedRequest] = field(default_factory=list)

    def add_token(self, seconds: float, *, is_first: bool) -> None:
        """Take note of a token."""
        (self.first_token_s if is_first else self.inter_token_s).append(seconds)
