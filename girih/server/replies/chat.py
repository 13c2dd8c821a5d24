"""The answer of /v1/chat/completions, whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from girih.request import Logprob, RequestOutput
from girih.server.replies.choice import ChoiceCursor, Delta
from girih.server.replies.completion import finite
from girih.server.replies.job import Job
from girih.server.replies.sse import event
from girih.server.replies.usage import UsageChunks, usage
from girih.server.tool_parsers import AnswerReader


class ChatReply:
    """Writes the answer of one conversation.

    Args:
        job: with one request of the engine.
        model: the name that the client called it by.
        created_s: seconds since 1970.
        num_choices: answers asked for.
        reader: finds calls of tools in the text.
        max_calls: of tools in one answer; more of them are left out.
    """

    def __init__(
        self, job: Job, *, model: str, created_s: int, num_choices: int, reader: type[AnswerReader], max_calls: int
    ):
        self._job = job
        self._head = {"id": job.request_id, "created": created_s, "model": model}
        self._num_choices = num_choices
        self._reader = reader
        self._max_calls = max_calls

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the answer when everything has ended."""
        (output,) = outputs
        choices = []
        for choice in output.outputs:
            reader = self._reader()
            content, calls = reader.append(choice.text)
            more, more_calls = reader.finish()
            calls, content = [*calls, *more_calls][: self._max_calls], content + more
            message: dict[str, Any] = {"role": "assistant", "content": content or None if calls else content}
            if calls:
                message["tool_calls"] = [call.whole() for call in calls]
            choices.append(
                {
                    "index": choice.index,
                    "message": message,
                    "logprobs": _logprobs(choice.logprobs),
                    "finish_reason": _finish_reason(choice.finish_reason, bool(calls)),
                    "stop_reason": choice.stop_reason,
                }
            )
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage(outputs)}

    async def stream(self, usage_chunks: UsageChunks) -> AsyncIterator[bytes]:
        """Yield the answer bit by bit as events.

        Args:
            usage_chunks: which of them have the numbers of tokens.

        Raises:
            ApiError: it could not be served.
            ClientGoneError: the client has gone.
        """
        head = {**self._head, "object": "chat.completion.chunk"}
        writers = [_ChoiceWriter(index, self._reader(), self._max_calls) for index in range(self._num_choices)]
        while True:
            outputs = await self._job.changed()
            self._job.check()
            rest = usage_chunks.of_chunk(outputs)
            (output,) = outputs
            events = [
                event({**head, "choices": [wire], **rest})
                for choice in output.outputs
                for wire in writers[choice.index].advance(choice)
            ]
            if output.finished:
                if usage_chunks is not UsageChunks.NONE:
                    events.append(event({**head, "choices": [], "usage": usage(outputs)}))
                yield b"".join(events)
                return
            if events:
                yield b"".join(events)


class _ChoiceWriter:
    """Writes one answer bit by bit.

    Args:
        index: of the answer.
        reader: finds calls of tools.
        max_calls: the most of them.
    """

    def __init__(self, index: int, reader: AnswerReader, max_calls: int):
        self._index = index
        self._max_calls = max_calls
        self._reader = reader
        self._cursor = ChoiceCursor()
        self._num_calls = 0
        self._is_first = True

    def advance(self, choice: Any) -> list[dict[str, Any]]:
        """Return the choices of the chunks that say what is new."""
        delta = self._cursor.advance(choice)
        if delta is None:
            return []
        content, calls = self._reader.append(delta.text)
        if delta.finish_reason is not None:
            more, more_calls = self._reader.finish()
            content, calls = content + more, [*calls, *more_calls]
        calls = calls[: self._max_calls - self._num_calls]
        message: dict[str, Any] = {"content": content} if content else {}
        if calls:
            first = self._num_calls
            message["tool_calls"] = [{"index": first + i, **call.whole()} for i, call in enumerate(calls)]
            self._num_calls += len(calls)
        if not (message or delta.logprobs or delta.finish_reason):
            return []
        if self._is_first:
            message = {"role": "assistant", "content": "", **message}
            self._is_first = False
        return [self._chunk(message, delta)]

    def _chunk(self, message: dict[str, Any], delta: Delta) -> dict[str, Any]:
        return {
            "index": self._index,
            "delta": message,
            "logprobs": _logprobs(delta.logprobs),
            "finish_reason": _finish_reason(delta.finish_reason, self._num_calls > 0),
            "stop_reason": delta.stop_reason,
        }


def _finish_reason(reason: str | None, has_calls: bool) -> str | None:
    return "tool_calls" if reason == "stop" and has_calls else reason


def _logprobs(positions: Sequence[Mapping[int, Logprob]] | None) -> dict[str, Any] | None:
    """Return log probabilities as OpenAI's chats write them: one object per token."""
    if positions is None:
        return None
    content = []
    for position in positions:
        entries = list(position.items())
        # the token itself comes first, and once more among the most likely if it is one of them
        top = [_entry(entry) for _, entry in sorted(entries, key=lambda item: item[1].rank)]
        content.append({**_entry(entries[0][1]), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(entry: Logprob) -> dict[str, Any]:
    text = entry.decoded_token
    return {"token": text, "logprob": finite(entry.logprob), "bytes": list(text.encode(errors="replace"))}
