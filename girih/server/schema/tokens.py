"""The bodies of /tokenize and /detokenize, as vLLM's."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from girih.server.schema.chat import Message
from girih.server.schema.common import Body, First, Flag, Text, Whole


class TokenizeBody(Body):
    """Turn a text, or a conversation, into token ids."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], First()] | None = Field(
        None, description="Instead of prompt: as /v1/chat/completions."
    )
    add_special_tokens: Flag = Field(True, description="Put what the model expects in front of a prompt.")
    add_generation_prompt: Flag = Field(True, description="End messages with the start of the assistant's turn.")
    return_token_strs: Flag = False


class DetokenizeBody(Body):
    """Turn token ids into text."""

    model: Text | None = None
    tokens: Annotated[list[Whole], First()]
