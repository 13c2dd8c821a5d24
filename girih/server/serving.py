"""`Serving`: what every path of the server needs, and how a prompt gets from a body into the engine."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from girih.engine.async_llm import AsyncLLM
from girih.engine.input_processing import TokenizedPrompt, check_grammar, tokenize
from girih.errors import RequestError
from girih.request import SamplingParams, output_room
from girih.server.access import Caller, caller_of, note_user
from girih.server.config import ServerConfig
from girih.server.errors import ApiError
from girih.server.metrics import Metrics
from girih.server.replies.job import Job
from girih.server.schema.common import SamplingBody
from girih.server.tracing import Tracer
from girih.server.watch import Watch

SHORT_TEXT = 4096
"""Characters that are tokenized at once; more of them in a thread, so that other requests go on meanwhile."""

RETRY_AFTER_S = 1

CHAT, COMPLETION = "chatcmpl", "cmpl"
"""With what ids of answers begin."""


@dataclass
class Serving:
    """One server.

    Args:
        engine: the engine.
        config: the server's options.
        model_names: what requests may call the model; the first is the one shown.
        metrics: counts what happens.
        tracer: records requests, if anybody wants to know.
    """

    engine: AsyncLLM
    config: ServerConfig
    model_names: tuple[str, ...]
    metrics: Metrics
    tracer: Tracer | None = None
    started_s: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        """Let people watch."""
        self.watch = Watch(self.engine, self.metrics)

    @staticmethod
    def of(request: Request) -> Serving:
        """Return the server that a request came to; for `Depends`."""
        serving: Serving = request.app.state.serving
        return serving

    def check_model(self, name: str | None) -> str:
        """Return the name that the answer calls the model.

        Raises:
            ApiError: no such model.
        """
        if name is not None and name not in self.model_names:
            known = ", ".join(self.model_names)
            raise ApiError(
                404, f"the model {name!r} is not served here; there is {known}", param="model", code="model_not_found"
            )
        return self.model_names[0] if name is None else name

    def check_moving(self) -> None:
        """Refuse requests while steps do not end, as `/health` does: they would pile up before an engine that hangs.

        Raises:
            ApiError: 503.
        """
        stalled_s = self.engine.stalled_s
        if stalled_s > self.config.health_timeout_s:
            raise ApiError(
                503,
                f"work has waited for {stalled_s:.0f} s without a step that ended (--health-timeout)",
                code="engine_stalled",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )

    def check_room(self, num_sequences: int) -> None:
        """Refuse requests while too many wait: memory is bounded, and clients are told to come back.

        Raises:
            ApiError: 429, or 400 if so many sequences could never wait.
        """
        most = self.engine.config.max_num_seqs + self.config.max_waiting
        if num_sequences > most:
            raise ApiError(400, f"{num_sequences} sequences are more than the {most} that this server takes at once")
        if self.engine.num_unfinished + num_sequences > most:
            raise ApiError(
                429,
                f"{self.engine.num_unfinished} sequences run or wait, of {most} (--max-num-seqs and --max-waiting); "
                "come back later",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )

    def check_length(self, prompts: Sequence[TokenizedPrompt], max_tokens: int | None) -> None:
        """Refuse a prompt that with the output asked for is longer than any request can be.

        Args:
            prompts: their tokens.
            max_tokens: of output; None takes what there is room for.

        Raises:
            ApiError: there is not room for so many, or not for one.
        """
        longest = self.engine.max_model_len
        for prompt in prompts:
            try:
                room = output_room(len(prompt.token_ids), longest)
            except RequestError as error:
                raise ApiError(400, str(error), param="prompt", code="context_length_exceeded") from None
            if max_tokens is not None and max_tokens > room:
                raise ApiError(
                    400,
                    f"a prompt of {len(prompt.token_ids)} tokens and {max_tokens} tokens of output are longer than the "
                    f"longest request that can be served, {longest} tokens; ask for at most {room}, or leave it out",
                    param="max_tokens",
                    code="context_length_exceeded",
                )

    async def tokenize(self, prompts: Sequence[str | list[int]], *, add_special_tokens: bool) -> list[TokenizedPrompt]:
        """Turn prompts into tokens.

        Raises:
            RequestError: one is empty, or not text.
        """
        tokenizer, vocab_size = self.engine.tokenizer, self.engine.vocab_size

        def work() -> list[TokenizedPrompt]:
            self._check_characters(prompts)
            return [
                tokenize(prompt, tokenizer, vocab_size, add_special_tokens=add_special_tokens) for prompt in prompts
            ]

        return await in_thread_if(sum(map(len, prompts)) > SHORT_TEXT, work)

    def _check_characters(self, prompts: Sequence[str | list[int]]) -> None:
        """Refuse a text that is too long whatever its tokens are: to tokenize it would take seconds and gigabytes.

        Raises:
            ApiError: 400.
        """
        most = max(SHORT_TEXT, self.engine.max_model_len * self.engine.tokenizer.max_token_characters)
        for prompt in prompts:
            if len(prompt) > most:
                raise ApiError(
                    400,
                    f"a prompt of {len(prompt)} characters is longer than the longest request that can be served, "
                    f"{self.engine.max_model_len} tokens",
                    code="context_length_exceeded",
                )

    async def render_chat(self, messages: Sequence[dict[str, Any]], **variables: Any) -> TokenizedPrompt:
        """Write a conversation as a prompt.

        Raises:
            GirihError: the model has no chat template, or it refuses these messages.
        """
        tokenizer, vocab_size = self.engine.tokenizer, self.engine.vocab_size

        def work() -> TokenizedPrompt:
            text = tokenizer.apply_chat_template(messages, **variables)
            self._check_characters([text])
            return tokenize(text, tokenizer, vocab_size, add_special_tokens=False)

        length = sum(len(str(message.get("content", ""))) for message in messages)
        return await in_thread_if(length > SHORT_TEXT, work)

    async def check_grammar(self, params: SamplingParams) -> None:
        """Refuse a grammar that cannot be used; that takes a second at worst, and so a thread.

        Raises:
            RequestError: why.
        """
        await in_thread_if(params.grammar is not None, lambda: check_grammar(params.grammar))

    def begin(
        self,
        request: Request,
        prefix: str,
        prompts: Sequence[TokenizedPrompt],
        params: SamplingParams,
        body: SamplingBody,
    ) -> Job:
        """Give the prompts of a request to the engine.

        Args:
            request: from the client.
            prefix: of the answer's id, `CHAT` or `COMPLETION`.
            prompts: at least one.
            params: how to sample.
            body: its priority, its salt (callers with another API key share nothing, whatever theirs is), its user.

        Raises:
            GirihError: one cannot be served; none is.
            ApiError: too many wait, or the engine hangs.
        """
        note_user(request, body.user)
        self.check_moving()
        self.check_room(len(prompts) * params.n)
        job = Job(self.engine, request, f"{prefix}-{uuid.uuid4().hex}", lambda job: self._record(request, job))
        salt = salt_of(caller_of(request), body.cache_salt)
        job.submit(prompts, params, priority=body.priority, cache_salt=salt)
        return job

    def _record(self, request: Request, job: Job) -> None:
        if self.tracer is not None:
            operation = "chat" if job.request_id.startswith(CHAT) else "text_completion"
            self.tracer.record(operation, job.request_id, job.lives, request.headers)


def salt_of(caller: Caller, cache_salt: str) -> str:
    """Return the salt of a caller's requests: unlike that of any caller with another key."""
    return cache_salt if caller.key_digest is None else f"{caller.key_digest}/{cache_salt}"


def is_own(caller: Caller, cache_salt: str) -> bool:
    """Tell whether a request with this salt of `salt_of` is a caller's own; without a key nobody's is.

    Args:
        caller: who asks.
        cache_salt: of the request.
    """
    return caller.key_digest is not None and cache_salt.startswith(f"{caller.key_digest}/")


async def in_thread_if(is_long: bool, work: Callable[[], Any]) -> Any:
    """Do work that holds the loop up in a thread, if it is long."""
    return await asyncio.to_thread(work) if is_long else work()
