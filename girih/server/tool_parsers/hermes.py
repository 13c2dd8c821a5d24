"""Calls as <tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes, Qwen, SmolLM2 and many others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from girih.server.tool_parsers import Call, ToolParser, as_call, call_schema

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Holds text back from the first sign of a call on, until it is one or cannot become one."""

    MARK = BEGIN

    def __init__(self) -> None:
        self._held = ""

    def append(self, text: str) -> tuple[str, list[Call]]:
        """Add text; see `ToolParser`."""
        self._held += text
        shown, calls = "", []
        while True:
            start = self._held.find(BEGIN)
            if start < 0:
                keep = _num_held(self._held)
                shown += self._held[: len(self._held) - keep]
                self._held = self._held[len(self._held) - keep :]
                break
            shown += self._held[:start]
            self._held = self._held[start:]
            end = self._held.find(END)
            if end < 0:
                break
            written, self._held = self._held[: end + len(END)], self._held[end + len(END) :]
            call = _read(written[len(BEGIN) : end])
            if call is None:
                shown += written  # not a call after all: the text is not lost
            else:
                calls.append(call)
        return shown.strip() if calls else shown, calls

    def finish(self) -> tuple[str, list[Call]]:
        """Take a last call whose end is missing, as when a stop token took its place; else show what was held back."""
        held, self._held = self._held, ""
        call = _read(held.removeprefix(BEGIN)) if held.startswith(BEGIN) else None
        return (held, []) if call is None else ("", [call])

    @staticmethod
    def grammar(tools: Mapping[str, Mapping[str, Any]]) -> str:
        """Return a grammar of one call; see `ToolParser`."""
        return f"start: {json.dumps(BEGIN)} %json {call_schema(tools)} {json.dumps(END)}"


def _read(text: str) -> Call | None:
    try:
        return as_call(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _num_held(text: str) -> int:
    """Count the characters at the end that may be the beginning of a call."""
    return next((n for n in range(len(BEGIN) - 1, 0, -1) if text.endswith(BEGIN[:n])), 0)


PARSER = HermesParser
