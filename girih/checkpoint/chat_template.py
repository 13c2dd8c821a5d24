"""Render a chat template: Jinja in a sandbox, with the helpers that templates on the Hugging Face Hub rely on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from girih.errors import CheckpointError, RequestError


class GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}`: marks the assistant's words for training, and renders as its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it as an instance variable)

    def parse(self, parser: Parser) -> nodes.Node:
        """Replace the block by what is inside it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def read_template(path: Path) -> str:
    """Read a template from a file.

    Raises:
        CheckpointError: it cannot be read, or is not valid Jinja.
    """
    try:
        template = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    _compile(template)
    return template


def render_chat(template: str, variables: Mapping[str, Any]) -> str:
    """Write messages as the text a chat model was trained on.

    Args:
        template: Jinja source.
        variables: what the template may use: messages, add_generation_prompt, bos_token, ...

    Raises:
        CheckpointError: the template is not valid Jinja.
        RequestError: the template refuses these messages, or cannot be rendered with them.
    """
    compiled = _compile(template)
    try:
        return compiled.render(variables)
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise RequestError(f"the chat template refuses these messages: {error}") from error


def variables_of(template: str) -> set[str]:
    """Return the names that a template asks whoever renders it for.

    Raises:
        CheckpointError: the template is not valid Jinja.
    """
    with _naming_line():
        return find_undeclared_variables(_environment().parse(template))


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    with _naming_line():
        return _environment().from_string(template)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    helpers: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(helpers)
    return environment


@contextmanager
def _naming_line() -> Iterator[None]:
    try:
        yield
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from error


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # jinja's own filter escapes <, > and & for HTML, which a prompt must not
    return json.dumps(value, indent=indent, **{"ensure_ascii": False, **options})


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
