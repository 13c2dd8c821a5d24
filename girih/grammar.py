"""`Grammar`: what an output must look like, and llguidance's matcher that follows one output, token by token.

Everything is bounded: the text by `MAX_CHARACTERS`, what becomes of it and each step of a matcher by llguidance. A
grammar that needs more is refused, or ends its own request; it never holds up others for longer than that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from girih.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CHARACTERS = 1 << 16
"""Of a grammar's text. The worst ones found take a second to compile and to start with."""

_STEP_LEXER_FUEL = 100_000
_MAX_LEXER_STATES = 25_000
"""Half and a tenth of llguidance's own limits, with which one request may take half a gigabyte."""

WHITESPACE = r" |\n[ \t]{0,32}"
"""What may stand between the parts of a JSON value: with any number of spaces an output need never get any further."""

_KINDS = ("json_schema", "regex", "choice", "lark")


@dataclass(frozen=True)
class Grammar:
    """What an output must look like, from its first character to its end-of-sequence token.

    Args:
        kind: "json_schema", "regex", "choice" (a JSON list of texts) or "lark" (llguidance's dialect).
        text: in the language of that kind.

    Raises:
        RequestError: an unknown kind, a text that is too long or no Unicode, or that is no JSON where it must be.
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        """Refuse what is no grammar at all; `girih.engine.input_processing.check_grammar` asks llguidance."""
        if self.kind not in _KINDS:
            raise RequestError(f"there is no grammar of kind {self.kind!r}; there are {', '.join(_KINDS)}")
        if not isinstance(self.text, str) or not self.text:
            raise RequestError(f"the text of a {self.kind} grammar must be a non-empty string, not {self.text!r}")
        if len(self.text) > MAX_CHARACTERS:
            raise RequestError(
                f"a {self.kind} grammar of {len(self.text)} characters is too long; at most {MAX_CHARACTERS}"
            )
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"a grammar is not valid Unicode text at character {error.start}") from error
        if self.kind == "json_schema" and not isinstance(self._parsed(), dict):
            raise RequestError("a JSON schema must be an object")
        if self.kind == "choice" and not _are_texts(self._parsed()):
            raise RequestError("the choices must be a JSON list of at least one text")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """Return the grammar of all JSON values that match a schema, given as an object or as its text."""
        return cls("json_schema", schema if isinstance(schema, str) else _to_json(schema))

    @classmethod
    def json_object(cls) -> Grammar:
        """Return the grammar of all JSON objects."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """Return the grammar of a few texts of which the output must be one."""
        return cls("choice", _to_json(list(texts)))

    def matcher(self, tokenizer: LLTokenizer) -> LLMatcher:
        """Return a matcher at the start of an output.

        Args:
            tokenizer: the tokens that outputs consist of.

        Returns:
            A matcher that raises nothing: where the grammar, or an output, is not possible, it `is_error` from then on.

        Raises:
            ValueError: JSON of which llguidance cannot make a grammar.
        """
        import llguidance

        limits = llguidance.LLParserLimits(
            step_lexer_fuel=_STEP_LEXER_FUEL, max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False
        )
        if self.kind == "json_schema":
            source = llguidance.LLMatcher.grammar_from_json_schema(
                self.text, defaults={"whitespace_pattern": WHITESPACE}
            )
        elif self.kind == "choice":  # as one terminal: thousands of alternatives of a rule are too many
            source = llguidance.LLMatcher.grammar_from_lark(
                "start: TEXT\nTEXT: " + " | ".join(map(json.dumps, self._parsed()))
            )
        elif self.kind == "regex":
            source = llguidance.LLMatcher.grammar_from_regex(self.text)
        else:
            source = llguidance.LLMatcher.grammar_from_lark(self.text)
        return llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)

    def _parsed(self) -> Any:
        # llguidance puts the text into JSON of its own, so it must be one whole value
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the text of a {self.kind} grammar is not valid JSON: {error}") from error


def describe_failure(matcher: LLMatcher) -> str:
    """Return in one line why a matcher is in error."""
    lines = [line.strip() for line in matcher.get_error().splitlines()]
    return "; ".join(line for line in lines if line and line != "<non-verbose/>")


def _to_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"a grammar must be plain JSON: {error}") from error


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)
