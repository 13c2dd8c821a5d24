"""POST /v1/completions."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from girih.server.replies.completion import CompletionReply, Echo
from girih.server.replies.sse import stream_of
from girih.server.schema.completions import CompletionBody
from girih.server.serving import Serving

router = APIRouter()


@router.post("/v1/completions", response_model=None)
async def create_completion(
    body: CompletionBody, request: Request, serving: Annotated[Serving, Depends(Serving.of)]
) -> Response:
    """Complete one prompt or several."""
    model = serving.check_model(body.model)
    params = body.sampling_params(serving.config)
    await serving.check_grammar(params)
    prompts = await serving.tokenize(body.prompts(serving.config), add_special_tokens=True)
    serving.check_length(prompts, params.max_tokens)
    job = serving.begin(request, "cmpl", prompts, params, priority=body.priority, cache_salt=body.cache_salt)
    tokenizer = serving.engine.tokenizer
    echoes = [
        Echo(
            tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text,
            tokenizer.token_to_text(prompt.token_ids[0]),
        )
        for prompt in prompts
    ]
    reply = CompletionReply(
        job,
        model=model,
        created_s=int(time.time()),
        num_choices=params.n,
        echoes=echoes if body.echo else None,
        shows_output=body.shows_output,
    )
    if body.stream:
        return await stream_of(job, reply.stream(body.usage_chunks))
    try:
        answer: dict[str, Any] = reply.whole(await job.finished())
    finally:
        job.abort()
    return JSONResponse(answer)
