"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from girih.server.errors import ApiError
from girih.server.schema.tokens import DetokenizeBody, TokenizeBody
from girih.server.serving import SHORT_TEXT, Serving, in_thread_if

router = APIRouter()


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, serving: Annotated[Serving, Depends(Serving.of)]) -> dict[str, Any]:
    """Turn a text, or a conversation, into token ids."""
    serving.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give prompt or messages, one of them", param="prompt")
    if body.messages is not None:
        messages = [message.for_template() for message in body.messages]
        prompt = await serving.render_chat(messages, add_generation_prompt=body.add_generation_prompt)
    else:
        assert body.prompt is not None
        (prompt,) = await serving.tokenize([body.prompt], add_special_tokens=body.add_special_tokens)
    ids = prompt.token_ids
    texts = [serving.engine.tokenizer.token_to_text(i) for i in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": serving.engine.max_model_len, "tokens": ids, "token_strs": texts}


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, serving: Annotated[Serving, Depends(Serving.of)]) -> dict[str, Any]:
    """Turn token ids into text, special tokens included."""
    serving.check_model(body.model)
    vocab_size = serving.engine.vocab_size
    for token_id in body.tokens:
        if not 0 <= token_id < vocab_size:
            raise ApiError(
                400, f"token id {token_id} is not in the vocabulary; ids go from 0 to {vocab_size - 1}", param="tokens"
            )
    tokenizer = serving.engine.tokenizer
    text = await in_thread_if(
        len(body.tokens) > SHORT_TEXT, lambda: tokenizer.decode(body.tokens, skip_special_tokens=False)
    )
    return {"prompt": text}
