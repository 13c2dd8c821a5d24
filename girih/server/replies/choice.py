"""`ChoiceCursor`: how much of one completion was sent, and what is new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from girih.request import CompletionOutput, Logprob


@dataclass(frozen=True)
class Delta:
    """What is new of a completion.

    Args:
        text: new text.
        logprobs: of its new tokens, if asked for.
        num_tokens: new tokens.
        finish_reason: if it has ended now.
        stop_reason: what ended it.
    """

    text: str
    logprobs: Sequence[Mapping[int, Logprob]] | None
    num_tokens: int
    finish_reason: str | None
    stop_reason: str | int | None


class ChoiceCursor:
    """How much of one completion was sent."""

    def __init__(self) -> None:
        self._num_characters = self._num_tokens = self._num_logprobs = 0
        self._has_ended = False

    def advance(self, output: CompletionOutput) -> Delta | None:
        """Return what is new since the last call; None if there is nothing to send, such as half a character."""
        if self._has_ended:
            return None
        text = output.text[self._num_characters :]
        logprobs = None if output.logprobs is None else output.logprobs[self._num_logprobs :]
        if not (text or logprobs or output.finish_reason):
            return None
        num_tokens = len(output.token_ids) - self._num_tokens
        self._num_characters = len(output.text)
        self._num_tokens = len(output.token_ids)
        self._num_logprobs += len(logprobs or ())
        self._has_ended = output.finish_reason is not None
        return Delta(text, logprobs, num_tokens, output.finish_reason, output.stop_reason)
