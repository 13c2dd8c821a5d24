"""What the scheduler reports after a step: the tokens as two lists, and an object only where there is more to say."""

from __future__ import annotations

from dataclasses import dataclass, field

from girih.messages import TokenLogprobs


@dataclass(slots=True)
class RequestUpdate:
    """What else became known of one request in one step, beside its token.

    Args:
        num_cached_tokens: prompt tokens that came from the prefix cache; in the step that lets it in, else None.
        logprobs: of its token (n = 1), if asked for.
        prompt_logprobs: of the next prompt tokens in order, if asked for.
        finish_reason: None while it runs; "stop", "length" or "error".
        stop_reason: the explicit stop token id that ended it.
        error: why it ended, with the reason "error".
    """

    num_cached_tokens: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None


@dataclass(slots=True)
class StepUpdate:
    """What became known in one step.

    Args:
        request_ids: the sequences that got a token, each once.
        token_ids: the tokens, in the same order.
        details: request id -> what else is to be said of it, with a token or without.
    """

    request_ids: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    details: dict[str, RequestUpdate] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Tell whether there is anything to report."""
        return bool(self.request_ids or self.details)

    def of(self, request_id: str) -> RequestUpdate:
        """Return the details of a request, to be filled in."""
        return self.details.setdefault(request_id, RequestUpdate())

    def drop(self, request_id: str) -> None:
        """Report nothing of a request."""
        self.details.pop(request_id, None)
        if request_id in self.request_ids:
            index = self.request_ids.index(request_id)
            del self.request_ids[index], self.token_ids[index]
