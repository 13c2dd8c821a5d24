"""The answer of /v1/completions, whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from girih.request import Logprob, RequestOutput
from girih.server.replies.choice import ChoiceCursor, Delta
from girih.server.replies.job import Job
from girih.server.replies.sse import event
from girih.server.replies.usage import UsageChunks, usage

Position = Mapping[int, Logprob] | None

LEAST_LOGPROB = -9999.0
"""What is written for minus infinity, which JSON lacks."""


@dataclass(frozen=True)
class Echo:
    """A prompt that the answer begins with.

    Args:
        text: of the prompt.
        first_token: text of its first token, which has no log probability.
    """

    text: str
    first_token: str


class CompletionReply:
    """Writes the answer of one request.

    Args:
        job: with one request of the engine per prompt.
        model: the name that the client called it by.
        created_s: seconds since 1970.
        num_choices: completions of each prompt.
        echoes: each prompt, where the answer begins with it; else None.
        shows_output: False for prompts only.
    """

    def __init__(
        self,
        job: Job,
        *,
        model: str,
        created_s: int,
        num_choices: int,
        echoes: Sequence[Echo] | None,
        shows_output: bool,
    ):
        self._job = job
        self._head = {"id": job.request_id, "object": "text_completion", "created": created_s, "model": model}
        self._num_choices = num_choices
        self._echoes = echoes
        self._shows_output = shows_output

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the answer when everything has ended."""
        choices = []
        for i, output in enumerate(outputs):
            for choice in output.outputs:
                delta = ChoiceCursor().advance(choice)
                assert delta is not None
                choices.append(self._choice(i, output, choice.index, delta, 0, is_first=True)[0])
        return {**self._head, "choices": choices, "usage": usage(outputs, shows_output=self._shows_output)}

    async def stream(self, usage_chunks: UsageChunks) -> AsyncIterator[bytes]:
        """Yield the answer bit by bit as events.

        Args:
            usage_chunks: which of them have the numbers of tokens.

        Raises:
            ApiError: a prompt could not be served.
            ClientGoneError: the client has gone.
        """
        num_prompts = len(self._job.lives)
        cursors = [[ChoiceCursor() for _ in range(self._num_choices)] for _ in range(num_prompts)]
        offsets = [[-1] * self._num_choices for _ in range(num_prompts)]  # characters sent; -1: not begun
        while True:
            outputs = await self._job.changed()
            self._job.check()
            rest = usage_chunks.of_chunk(outputs)
            events = []
            for i, output in enumerate(outputs):
                for choice in output.outputs:
                    delta = cursors[i][choice.index].advance(choice)
                    if delta is not None:
                        offset = offsets[i][choice.index]
                        is_first, offset = offset < 0, max(0, offset)
                        wire, offsets[i][choice.index] = self._choice(
                            i, output, choice.index, delta, offset, is_first=is_first
                        )
                        events.append(event({**self._head, "choices": [wire], **rest}))
            if all(output.finished for output in outputs):
                if usage_chunks is not UsageChunks.NONE:
                    numbers = usage(outputs, shows_output=self._shows_output)
                    events.append(event({**self._head, "choices": [], "usage": numbers}))
                yield b"".join(events)
                return
            if events:
                yield b"".join(events)

    def _choice(
        self, prompt: int, output: RequestOutput, index: int, delta: Delta, offset: int, *, is_first: bool
    ) -> tuple[dict[str, Any], int]:
        """Return one choice of the answer, and how many characters of it were sent with that."""
        text = delta.text if self._shows_output else ""
        positions: list[Position] | None = None
        if delta.logprobs is not None:
            positions = list(delta.logprobs) if self._shows_output else []
        first_token = ""
        if is_first and self._echoes is not None:
            echo = self._echoes[prompt]
            text, first_token = echo.text + text, echo.first_token
            if positions is not None:
                positions = [*(output.prompt_logprobs or ()), *positions]
        wire = {
            "index": prompt * self._num_choices + index,
            "text": text,
            "logprobs": None if positions is None else _logprobs(positions, first_token, offset),
            "finish_reason": delta.finish_reason if self._shows_output or not delta.finish_reason else "length",
            "stop_reason": delta.stop_reason,
        }
        return wire, offset + len(text)


def _logprobs(positions: Sequence[Position], first_token: str, offset: int) -> dict[str, Any]:
    """Return log probabilities as OpenAI's completions write them: four lists of one item per token."""
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for position in positions:
        entries = [] if position is None else [(e.decoded_token, finite(e.logprob)) for e in position.values()]
        token, value = entries[0] if entries else (first_token, None)  # nothing predicts the first of a prompt
        tokens.append(token)
        values.append(value)
        tops.append(dict([*entries[1:], entries[0]]) if entries else None)
        offsets.append(offset)
        offset += len(token)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def finite(logprob: float) -> float:
    """Return a log probability that JSON can hold."""
    return max(logprob, LEAST_LOGPROB)
