"""The body of POST /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from girih.grammar import Grammar
from girih.request import SamplingParams
from girih.server.config import ServerConfig
from girih.server.errors import ApiError
from girih.server.schema.common import Body, First, Flag, SamplingBody, Text, Whole, check_max_logprobs, make_params


class TextPart(Body):
    """A piece of a message's text. Other pieces, such as images, are not supported."""

    type: Literal["text"]
    text: Text


class FunctionCall(Body):
    """A call that the assistant made: the function and its arguments, as JSON text."""

    name: Text
    arguments: Text


class ToolCall(Body):
    """A tool that the assistant called."""

    id: Text = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], First()] | None = None
    name: Text | None = None
    refusal: Text | None = None
    tool_calls: Annotated[list[ToolCall], First()] | None = None
    tool_call_id: Text | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it.

        Raises:
            ApiError: there is no content, or the arguments of a tool call are no JSON object.
        """
        if self.content is None and self.role != "assistant":
            raise ApiError(400, f"a message of role {self.role!r} needs content", param="messages")
        parts = self.content if isinstance(self.content, list) else None
        content = self.content if parts is None else "".join(part.text for part in parts)
        # templates were written before "developer" was
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        message["content"] = (self.refusal or "") if content is None else content
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": call.type, "function": _with_arguments(call.function)}
                for call in self.tool_calls
            ]
        for name in ("name", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        return message


def _with_arguments(call: FunctionCall) -> dict[str, Any]:
    """Return a call with its arguments as an object, which templates write as they like."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(
            400, f"the arguments of the tool call {call.name!r} must be a JSON object, as text", param="messages"
        )
    return {"name": call.name, "arguments": arguments}


class Function(Body):
    """A function that the model may call."""

    name: Text = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: Text = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: Flag = False


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """A function by its name."""

    name: Text


class NamedTool(Body):
    """A tool by its name."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(SamplingBody):
    """Answer a conversation."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "store": (False,),
        "modalities": (["text"],),
        "service_tier": ("auto", "default"),
        "metadata": ({},),
        "functions": ([],),
    }

    messages: Annotated[list[Message], First()]
    max_tokens: Whole | None = Field(None, description="Of output; left out, up to the longest request.")
    max_completion_tokens: Whole | None = Field(None, description="The same; OpenAI's newer name.")
    logprobs: Flag = Field(False, description="Report log probabilities of the output.")
    top_logprobs: Whole | None = Field(None, description="With so many most likely tokens per position.")
    tools: Annotated[list[Tool], First()] | None = Field(
        None, description="Functions the model may call, if its template knows tools."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: Flag = True
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Beyond OpenAI's: variables for the model's chat template."
    )

    def template_messages(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates expect them.

        Raises:
            ApiError: there is none, or one that cannot be used.
        """
        if not self.messages:
            raise ApiError(400, "there is no message; give at least one", param="messages")
        return [message.for_template() for message in self.messages]

    @property
    def asked_max_tokens(self) -> int | None:
        """Return the output tokens asked for, None if they were left out."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def sampling_params(self, config: ServerConfig, call_grammar: Grammar | None) -> SamplingParams:
        """Return how to sample.

        Args:
            config: limits.
            call_grammar: of a call that the answer must be; see `girih.server.tools`.

        Raises:
            ApiError: a limit of the server, or two fields that contradict each other.
            RequestError: a value out of range.
        """
        self.check_common(config)
        check_max_logprobs("top_logprobs", self.top_logprobs, config)
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs is only for logprobs: true", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ApiError(400, "give max_tokens or max_completion_tokens, not both", param="max_tokens")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        common = self.common_params()
        if call_grammar is not None:
            common["grammar"] = call_grammar
        return make_params(**common, max_tokens=self.asked_max_tokens, logprobs=logprobs)
