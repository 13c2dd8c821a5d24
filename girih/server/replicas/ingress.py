"""What clients talk to: lets requests in, finds out the tokens of their prompts, and passes answers on."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import numpy as np
from prometheus_client import exposition
from pydantic import ValidationError
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from girih.engine.async_llm import AsyncLLM
from girih.engine.input_processing import TokenizedPrompt, tokenize
from girih.errors import GirihError
from girih.kv.hashing import TokenHasher
from girih.server.access import DASHBOARD_PREFIX, Gate, caller_of
from girih.server.errors import ApiError
from girih.server.replicas.answer import Answer
from girih.server.replicas.join_metrics import join_metrics
from girih.server.replicas.messages import AsgiMessage, Forwarded, Hint
from girih.server.replicas.options import Options
from girih.server.schema.chat import ChatBody
from girih.server.schema.completions import CompletionBody
from girih.server.serving import SHORT_TEXT, in_thread_if, salt_of
from girih.server.tools import tool_use

logger = logging.getLogger("ray.serve")

MAX_TRIES = 3
"""Replicas that may die while they work on a request, before it is taken for the reason."""

MAX_HINT_LENGTH = 1 << 18
"""Characters, or token ids, of a prompt that decide where it goes, so that finding them out takes a moment at most."""

ASK_TIMEOUT_S = 5.0
"""How long replicas have to say how they are."""

GONE = (RayActorError, DeploymentUnavailableError)
"""What a call raises when its replica has ended, or there is none at all."""


class Ingress:
    """Serves HTTP, with whatever replicas there are.

    Args:
        replicas: to call them.
        options: of the application.

    Raises:
        GirihError: the model is not there, or its tokenizer cannot be read.
    """

    def __init__(self, replicas: DeploymentHandle, options: Options):
        engine = AsyncLLM(options.engine)  # never started: it only knows how prompts are read
        self._tokenizer, self._vocab_size = engine.tokenizer, engine.vocab_size
        self._config = options.server
        self._replicas = replicas
        self._app = Gate(self._serve, options.server)
        hasher = TokenHasher(16, bytes(16))
        hasher.chain(hasher.root(""), np.zeros(16, dtype=np.int32))  # loaded now and not with the first request

    async def __call__(self, request: Request) -> Response:
        """Return what answers a request."""
        return _AsResponse(self._app)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/health":
            await (await self._health())(scope, receive, send)
        elif path == "/metrics":
            await (await self._metrics())(scope, receive, send)
        elif path == "/" or path.startswith(DASHBOARD_PREFIX):
            raise ApiError(404, "the live page shows one engine, and there are several here; see /metrics")
        else:
            await self._forward(scope, receive, send)

    # ---- what all replicas are asked

    async def _health(self) -> Response:
        problems = await self._ask_all("health")
        if None in problems:
            return JSONResponse({"status": "ok"})
        reason = f"no replica can serve: {problems[0]}" if problems else "there is no replica now"
        raise ApiError(503, reason, code="engine_unavailable", headers={"Retry-After": "5"})

    async def _metrics(self) -> Response:
        texts = [text for text in await self._ask_all("metrics") if isinstance(text, str)]
        return Response(join_metrics(texts), media_type=exposition.CONTENT_TYPE_LATEST)

    async def _ask_all(self, method: str) -> list[Any]:
        """Call a method of every replica; returns what they answer, or why they do not."""
        try:
            return await self._replicas.broadcast(method).results_async(timeout_s=ASK_TIMEOUT_S, return_exceptions=True)
        except DeploymentUnavailableError:
            return []
        except TimeoutError:
            logger.warning("not all replicas have told their %s within %g s", method, ASK_TIMEOUT_S)
            return []

    # ---- what one replica answers

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _whole_body(receive)
        if body is None:
            return
        hint = await self._hint(scope, body)
        answer = Answer(send)
        for _ in range(MAX_TRIES):
            try:
                async for messages in self._ask(Forwarded(_plain(scope), body, hint)):
                    await answer.pass_on(messages)
                return
            except GONE as error:
                logger.warning("a replica was lost with a request: %s", error)
                if answer.has_begun:
                    break
        await answer.fail()

    async def _ask(self, request: Forwarded) -> AsyncIterator[list[AsgiMessage]]:
        response: Any = self._replicas.options(stream=True).answer.remote(request)
        try:
            async for messages in response:
                yield messages
        finally:
            response.cancel()  # the client has gone; after the end this does nothing

    async def _hint(self, scope: Scope, body: bytes) -> Hint | None:
        """Say what decides where a request goes; what no server would take may go anywhere, to be refused there."""
        try:
            found = await self._prompt(scope["path"], body)
        except (ValidationError, GirihError, ApiError):
            return None
        if found is None:
            return None
        parsed, prompt, num_prompts = found
        token_ids = np.array(prompt.token_ids, dtype=np.int32)
        salt = salt_of(caller_of(Request(scope)), parsed.cache_salt)
        return Hint(token_ids, salt, num_prompts * parsed.num_completions)

    async def _prompt(self, path: str, body: bytes) -> tuple[CompletionBody | ChatBody, TokenizedPrompt, int] | None:
        """Return a request, the beginning of its first prompt, and how many it has; None for a path without prompts."""
        tokenizer, vocab_size = self._tokenizer, self._vocab_size
        is_long = len(body) > SHORT_TEXT
        if path == "/v1/completions":
            completion = CompletionBody.model_validate_json(body)
            prompts = completion.prompts(self._config)
            start = prompts[0][:MAX_HINT_LENGTH]
            prompt = await in_thread_if(is_long, lambda: tokenize(start, tokenizer, vocab_size))
            return completion, prompt, len(prompts)
        if path == "/v1/chat/completions":
            chat = ChatBody.model_validate_json(body)
            messages, tools = chat.template_messages(), tool_use(chat, tokenizer).shown

            def render() -> TokenizedPrompt:
                text = tokenizer.apply_chat_template(messages, tools=tools, variables=chat.chat_template_kwargs)
                return tokenize(text[:MAX_HINT_LENGTH], tokenizer, vocab_size, add_special_tokens=False)

            return chat, await in_thread_if(is_long, render), 1
        return None


class _AsResponse(Response):
    """An application as the response that Serve wants, without the header that Serve writes itself.

    Args:
        app: the application.
    """

    def __init__(self, app: ASGIApp):
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""

        async def send_without_id(message: AsgiMessage) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [header for header in message["headers"] if header[0].lower() != b"x-request-id"]
            await send(message)

        path = scope["path"].removeprefix(scope.get("root_path", ""))
        here = {"path": path, "raw_path": quote(path).encode(), "root_path": ""}
        await self._app({**scope, **here}, receive, send_without_id)


async def _whole_body(receive: Receive) -> bytes | None:
    """Return the body of a request; None if the client has gone before its end."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def _plain(scope: Scope) -> dict[str, Any]:
    """Return what of a scope can be sent, with the id that the request has got."""
    names = (
        "type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "root_path", "query_string", "client",
        "server",
    )  # fmt: skip
    request_id = caller_of(Request(scope)).request_id.encode("latin-1")
    headers = [header for header in scope["headers"] if header[0].lower() != b"x-request-id"]
    return {name: scope.get(name) for name in names} | {"headers": [*headers, (b"x-request-id", request_id)]}
