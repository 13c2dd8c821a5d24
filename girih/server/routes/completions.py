"""POST /v1/completions."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from girih.engine.input_processing import TokenizedPrompt
from girih.server.replies.completion import CompletionReply, Echo
from girih.server.replies.sse import stream_of
from girih.server.schema.completions import CompletionBody
from girih.server.serving import COMPLETION, Serving

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
    echoes = [_echo(prompt, serving) for prompt in prompts] if body.echo else None
    job = serving.begin(request, COMPLETION, prompts, params, body)
    reply = CompletionReply(
        job,
        model=model,
        created_s=int(time.time()),
        num_choices=params.n,
        echoes=echoes,
        shows_output=body.shows_output,
    )
    if body.stream:
        return await stream_of(job, reply.stream(body.usage_chunks))
    try:
        answer: dict[str, Any] = reply.whole(await job.finished())
    finally:
        job.end()
    return JSONResponse(answer)


def _echo(prompt: TokenizedPrompt, serving: Serving) -> Echo:
    tokenizer = serving.engine.tokenizer
    text = tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text
    return Echo(text, tokenizer.token_to_text(prompt.token_ids[0]))
