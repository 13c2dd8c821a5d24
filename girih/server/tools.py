"""What tools mean for one chat: what its template is shown, what the answer must be, and who reads calls from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from girih.checkpoint.tokenizer import Tokenizer
from girih.grammar import Grammar
from girih.server import tool_parsers
from girih.server.errors import ApiError
from girih.server.schema.chat import ChatBody, Tool
from girih.server.tool_parsers import AnswerReader, PlainText

MANY_CALLS = 128


@dataclass(frozen=True)
class ToolUse:
    """How one chat uses tools.

    Args:
        shown: tools for the chat template; None if there are none.
        reader: reads calls from the answer.
        grammar: of a call, where the answer must be one.
        max_calls: in one answer.
    """

    shown: Sequence[dict[str, Any]] | None = None
    reader: type[AnswerReader] = PlainText
    grammar: Grammar | None = None
    max_calls: int = MANY_CALLS


def tool_use(body: ChatBody, tokenizer: Tokenizer) -> ToolUse:
    """Say how a chat uses tools.

    Args:
        body: of the request.
        tokenizer: has the model's chat template.

    Raises:
        ApiError: the model cannot call tools, or not these.
    """
    if not tokenizer.uses_tools and any(message.tool_calls or message.role == "tool" for message in body.messages):
        raise ApiError(
            400, "this model's chat template knows no tools: it would leave their calls out", param="messages"
        )
    choice = body.tool_choice or ("auto" if body.tools else "none")
    if not body.tools:
        if choice != "none":
            raise ApiError(400, "tool_choice is only for tools; give some", param="tool_choice")
        return ToolUse()
    if not tokenizer.uses_tools:
        known = "this model's chat template knows no tools; leave them out, or give --chat-template"
        raise ApiError(400, known, param="tools")
    parser = tool_parsers.find(tokenizer.chat_template or "")
    if parser is None:
        raise ApiError(400, "Girih cannot read the calls of tools that this model writes", param="tools")
    shown = [tool.model_dump(exclude_unset=True) for tool in body.tools]
    if choice == "none":
        return ToolUse(shown)
    if body.response_format is not None and body.response_format.type != "text":
        raise ApiError(
            400, 'response_format and tools exclude each other, but for tool_choice "none"', param="response_format"
        )
    grammar = None if choice == "auto" else Grammar("lark", parser.grammar(_schemas(_chosen(body.tools, choice))))
    return ToolUse(shown, parser, grammar, MANY_CALLS if body.parallel_tool_calls else 1)


def _chosen(tools: Sequence[Tool], choice: Any) -> Sequence[Tool]:
    if choice == "required":
        return tools
    chosen = [tool for tool in tools if tool.function.name == choice.function.name]
    if not chosen:
        raise ApiError(
            400, f"tool_choice names {choice.function.name!r}, which is not among tools", param="tool_choice"
        )
    return chosen


def _schemas(tools: Sequence[Tool]) -> dict[str, dict[str, Any]]:
    return {tool.function.name: tool.function.parameters for tool in tools}
