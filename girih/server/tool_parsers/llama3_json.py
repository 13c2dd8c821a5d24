"""A whole answer that is {"name": ..., "parameters": {...}}: Llama 3.1 and later."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from girih.server.tool_parsers import Call, ToolParser, as_call, call_schema


class Llama3Parser(ToolParser):
    """Holds an answer back that begins like a JSON object; any other is shown as it comes."""

    MARK = '"parameters": dictionary of argument'

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False

    def append(self, text: str) -> tuple[str, list[Call]]:
        """Add text; see `ToolParser`."""
        if self._is_text:
            return text, []
        self._held += text
        self._is_text = not self._held.lstrip().startswith("{") and bool(self._held.strip())
        if not self._is_text:
            return "", []
        shown, self._held = self._held, ""
        return shown, []

    def finish(self) -> tuple[str, list[Call]]:
        """Read what was held back; see `ToolParser`."""
        held, self._held = self._held, ""
        try:
            call = as_call(json.loads(held), "parameters") if held else None
        except (ValueError, RecursionError):
            call = None
        return (held, []) if call is None else ("", [call])

    @staticmethod
    def grammar(tools: Mapping[str, Mapping[str, Any]]) -> str:
        """Return a grammar of one call; see `ToolParser`."""
        return f"start: %json {call_schema(tools, 'parameters')}"


PARSER = Llama3Parser
