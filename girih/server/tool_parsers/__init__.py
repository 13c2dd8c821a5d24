"""How models write calls of tools into their text: a file for each way, found by what the chat template says.

Every file defines `PARSER`, a `ToolParser`.
"""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from girih import plugins
from girih.grammar import WHITESPACE


@dataclass(frozen=True)
class Call:
    """A call of a tool.

    Args:
        name: of the function.
        arguments: JSON text of an object.
        call_id: by which the client says what came of it.
    """

    name: str
    arguments: str
    call_id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def whole(self) -> dict[str, Any]:
        """Return it as OpenAI's API writes it."""
        return {
            "id": self.call_id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class AnswerReader(ABC):
    """Takes calls of tools out of one answer's text as it comes."""

    @abstractmethod
    def append(self, text: str) -> tuple[str, list[Call]]:
        """Add text; returns what is to be shown of it and of what was held back, and the calls that are complete."""

    @abstractmethod
    def finish(self) -> tuple[str, list[Call]]:
        """Return what was held back when the text ends."""


class PlainText(AnswerReader):
    """Text without calls."""

    def append(self, text: str) -> tuple[str, list[Call]]:
        """Show everything."""
        return text, []

    def finish(self) -> tuple[str, list[Call]]:
        """Return nothing: nothing was held back."""
        return "", []


class ToolParser(AnswerReader):
    """One way of writing calls. `MARK` stands in the chat templates of models that write them so."""

    MARK: ClassVar[str]

    @staticmethod
    @abstractmethod
    def grammar(tools: Mapping[str, Mapping[str, Any]]) -> str:
        """Return a Lark grammar of one call of one of these tools.

        Args:
            tools: name -> JSON schema of the arguments.
        """


def find(chat_template: str) -> type[ToolParser] | None:
    """Return the parser of the way in which models with this template write calls; None for a way nobody knows."""
    for name in plugins.available("girih.server.tool_parsers"):
        parser: type[ToolParser] = plugins.load("girih.server.tool_parsers", name, what="tool parser").PARSER
        if parser.MARK in chat_template:
            return parser
    return None


def call_schema(tools: Mapping[str, Mapping[str, Any]], arguments: str = "arguments") -> str:
    """Return the JSON schema, as text, of one call of one of these tools.

    Args:
        tools: name -> JSON schema of the arguments.
        arguments: what the call names them.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, arguments: schema or {"type": "object"}},
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for name, schema in tools.items()
    ]
    return json.dumps({"anyOf": calls, "x-guidance": {"whitespace_pattern": WHITESPACE}})


def as_call(value: Any, arguments: str = "arguments") -> Call | None:
    """Return the call that a JSON object with "name" and its arguments stands for; None if it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = value.get(arguments, {})
    return Call(value["name"], json.dumps(given, ensure_ascii=False)) if isinstance(given, dict) else None
