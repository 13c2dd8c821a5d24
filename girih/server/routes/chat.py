"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from girih.server.replies.chat import ChatReply
from girih.server.replies.sse import stream_of
from girih.server.schema.chat import ChatBody
from girih.server.serving import CHAT, Serving
from girih.server.tools import tool_use

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None)
async def create_chat_completion(
    body: ChatBody, request: Request, serving: Annotated[Serving, Depends(Serving.of)]
) -> Response:
    """Answer a conversation."""
    model = serving.check_model(body.model)
    tools = tool_use(body, serving.engine.tokenizer)
    params = body.sampling_params(serving.config, tools.grammar)
    await serving.check_grammar(params)
    prompt = await serving.render_chat(body.template_messages(), tools=tools.shown, variables=body.chat_template_kwargs)
    serving.check_length([prompt], params.max_tokens)
    job = serving.begin(request, CHAT, [prompt], params, body)
    reply = ChatReply(
        job,
        model=model,
        created_s=int(time.time()),
        num_choices=params.n,
        reader=tools.reader,
        max_calls=tools.max_calls,
    )
    if body.stream:
        return await stream_of(job, reply.stream(body.usage_chunks))
    try:
        answer = reply.whole(await job.finished())
    finally:
        job.end()
    return JSONResponse(answer)
