"""Command-line options made from a dataclass: one option per field, its type, default and help taken from there.

So a command takes exactly what `EngineConfig` and `SamplingParams` take, and a new field is an option at once.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Optional, get_type_hints

import typer

from girih.errors import ConfigError, GirihError, RequestError
from girih.grammar import Grammar
from girih.units import parse_bytes

CALM = {"temperature": 0.6, "top_p": 0.95}
"""What the commands sample with unless told otherwise: at temperature 1 small models ramble."""


@dataclass(frozen=True)
class _Written:
    """How a field whose type no option can have is written on the command line.

    Args:
        option: the option's name.
        kind: the type that typer reads.
        parse: from that to the field's value.
        variable: an environment variable that is read where the option is not given.
    """

    option: str
    kind: Any
    parse: Callable[[Any], Any]
    variable: str | None = None


def parse_length(text: str) -> int | str:
    """Read "auto" or a number of tokens; `EngineConfig` refuses numbers out of range.

    Raises:
        ConfigError: it is neither.
    """
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f'--max-model-len {text!r} must be a whole number of tokens, or "auto"') from None


def parse_split(text: str) -> tuple[int, ...]:
    """Read numbers of layers such as "10,8".

    Raises:
        ConfigError: something else.
    """
    numbers = [part.strip() for part in text.split(",")]
    if not all(number.isdecimal() and int(number) > 0 for number in numbers):
        raise ConfigError(f"--pipeline-split {text!r} must be the layers of each stage, such as 10,8")
    return tuple(map(int, numbers))


def parse_logit_bias(texts: Sequence[str]) -> dict[int, float]:
    """Read biases such as "42=-5", one token each.

    Raises:
        RequestError: something else.
    """
    bias = {}
    for text in texts:
        token_id, _, value = text.partition("=")
        try:
            bias[int(token_id)] = float(value)
        except ValueError:
            raise RequestError(f"--logit-bias {text!r} must be a token id and a number, such as 42=-5") from None
    return bias


def parse_grammar(text: str) -> Grammar:
    """Read a grammar such as "regex=[0-9]+".

    Raises:
        RequestError: there is no such kind, or the text is no grammar of it.
    """
    kind, _, rest = text.partition("=")
    return Grammar(kind, rest)


_WRITTEN = {
    "max_model_len": _Written("--max-model-len", str, parse_length),
    "kv_cache_memory_bytes": _Written("--kv-cache-memory", Optional[str], parse_bytes),  # noqa: UP045
    "kv_cache_memory": _Written("--kv-cache-memory", Optional[str], parse_bytes),  # noqa: UP045
    "memory": _Written("--memory", Optional[str], parse_bytes),  # noqa: UP045
    "kv_cache_dtype": _Written("--kv-dtype", str, str),
    "quantization": _Written("--quantization", Optional[str], str),  # noqa: UP045
    "step_timeout_s": _Written("--step-timeout", float, float),
    "health_timeout_s": _Written("--health-timeout", float, float),
    "shutdown_timeout_s": _Written("--shutdown-timeout", float, float),
    "served_model_name": _Written("--served-model-name", list[str], tuple),
    "chat_template": _Written("--chat-template", Optional[Path], Path),  # noqa: UP045
    "api_key": _Written("--api-key", list[str], tuple, "GIRIH_API_KEY"),
    "kv_events_endpoint": _Written("--kv-events-endpoint", Optional[str], str),  # noqa: UP045
    "kv_events_replay_endpoint": _Written("--kv-events-replay-endpoint", Optional[str], str),  # noqa: UP045
    "otlp_endpoint": _Written("--otlp-endpoint", Optional[str], str),  # noqa: UP045
    "pipeline_split": _Written("--pipeline-split", Optional[str], parse_split),  # noqa: UP045
    "stop": _Written("--stop", list[str], tuple),
    "stop_token_ids": _Written("--stop-token-ids", list[int], tuple),
    "logit_bias": _Written("--logit-bias", list[str], parse_logit_bias),
    "grammar": _Written("--grammar", Optional[str], parse_grammar),  # noqa: UP045
}


def with_options(
    *classes: type, defaults: Mapping[str, Any] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for every field of these dataclasses.

    The command takes `**options`; there it finds what was typed, ready for `build`. An error that names a field and its
    value at the beginning names the option instead.

    Args:
        *classes: dataclasses whose docstring describes their fields under "Args:"; a name that several have, such
            as the seed, is one option, as the first describes it.
        defaults: field -> default, where the command's differs from the dataclass'.
    """

    def _decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        made = [p for cls in classes for p in _parameters(cls, defaults or {})]
        by_name = {p.name: p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in reversed([*own, *made])}
        parameters = list(reversed(by_name.values()))

        def run(**values: Any) -> None:
            try:
                command(**values)
            except GirihError as error:
                error.args = (
                    _as_typed(str(error), {field.name for cls in classes for field in dataclasses.fields(cls)}),
                )
                raise

        run.__doc__ = command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return _decorate


def build(cls: type, options: Mapping[str, Any]) -> Any:
    """Make a dataclass from the options that belong to it.

    Raises:
        GirihError: a value that the dataclass or its parser refuses.
    """
    values = {}
    for field in dataclasses.fields(cls):
        value = options[field.name]
        written = _WRITTEN.get(field.name)
        values[field.name] = value if written is None or value is None else written.parse(value)
    return cls(**values)


def _as_typed(message: str, fields: Collection[str]) -> str:
    """Name an option as it is typed, where a message begins with a field and its value: "n=0 must" -> "--n 0 must"."""
    match = re.match(r"(\w+)=", message)
    if match is None or match[1] not in fields:
        return message
    written = _WRITTEN.get(match[1])
    option = "--" + match[1].replace("_", "-") if written is None else written.option
    return f"{option} {message[match.end() :]}"


def _parameters(cls: type, defaults: Mapping[str, Any]) -> list[inspect.Parameter]:
    hints, help_texts = get_type_hints(cls), _field_help(cls)
    parameters = []
    for field in dataclasses.fields(cls):
        written = _WRITTEN.get(field.name)
        kind = hints[field.name] if written is None else written.kind
        names = [] if written is None else [written.option]
        default = defaults.get(field.name, field.default)
        if default is dataclasses.MISSING:
            default = ...
        elif isinstance(default, tuple):
            default = list(default)
        variable = None if written is None else written.variable
        option = typer.Option(*names, help=help_texts[field.name], envvar=variable)
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if default is ... else default,
                annotation=Annotated[kind, option],
            )
        )
    return parameters


def _field_help(cls: type) -> dict[str, str]:
    """Read field -> description from the "Args:" of a docstring, one line each."""
    found: dict[str, str] = {}
    for line in inspect.getdoc(cls).partition("Args:")[2].splitlines():  # type: ignore[union-attr]
        match = re.match(r"    (\w+): (.*)", line)
        if match:
            found[match[1]] = match[2][0].upper() + match[2][1:]
    return found
