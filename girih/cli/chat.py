"""`girih chat`: talk to a model."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from girih.cli._options import CALM, build, with_options
from girih.cli._progress import find_model
from girih.config import EngineConfig
from girih.errors import ConfigError, GirihError
from girih.request import SamplingParams

if TYPE_CHECKING:
    from girih.engine.llm import LLM


@with_options(EngineConfig, SamplingParams, defaults={**CALM, "max_tokens": None})
def command(
    chat_template: Annotated[
        Optional[Path],  # noqa: UP045  # typer reads it at run time
        typer.Option(
            help="A file with a Jinja chat template, instead of the model's own.", exists=True, dir_okay=False
        ),
    ] = None,
    system: Annotated[str, typer.Option(help="A system message at the start of the conversation.")] = "",
    **options: Any,
) -> None:
    """Talk to a model; it remembers the conversation.

    Each line is one message. Ctrl-C stops an answer, an empty line is ignored, Ctrl-D or "/bye" ends, "/new" forgets.
    """
    config = build(EngineConfig, options)
    params = build(SamplingParams, options)
    from girih.checkpoint.chat_template import read_template

    template = None if chat_template is None else read_template(chat_template)
    start = [{"role": "system", "content": system}] if system else []

    from girih.engine.llm import LLM

    check_template(find_model(config.model), template)
    if sys.stdin.isatty():
        print(f"loading {config.model} ...", file=sys.stderr)
    with LLM(**vars(config)) as llm:
        if sys.stdin.isatty():
            print(f"{config.model} is ready, up to {llm.max_model_len} tokens. Ctrl-D or /bye ends.", file=sys.stderr)
        messages = list(start)
        for line in _lines():
            if line == "/new":
                messages = list(start)
                continue
            messages.append({"role": "user", "content": line})
            try:
                answer = _answer(llm, messages, params, template)
            except GirihError as error:  # too long, or refused by the template: the conversation goes on without it
                print(f"girih: {error}", file=sys.stderr)
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def check_template(directory: Path, chat_template: str | None) -> None:
    """Refuse a model without a chat template before it is loaded.

    Raises:
        ConfigError: there is none; the message names --chat-template.
    """
    from girih.checkpoint.tokenizer import NO_CHAT_TEMPLATE, Tokenizer

    if chat_template is None and Tokenizer.from_directory(directory).chat_template is None:
        raise ConfigError(NO_CHAT_TEMPLATE)


def _lines() -> Iterator[str]:
    """Yield what the user types until the end of input or "/bye"; a prompt is shown on a terminal only."""
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):  # not on every platform; input() works without
            import readline  # noqa: F401  # gives input() a history and line editing
    while True:
        try:
            line = input("\n> " if interactive else "").strip()
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise GirihError(f"standard input is not text: {error}") from error
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return
        if line == "/bye":
            return
        if line:
            yield line


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams, template: str | None) -> str:
    """Print the answer as it is made and return it, also when Ctrl-C cut it short."""
    shown = ""
    stream = llm.stream(llm.render_chat(messages, template), params)
    with _interrupt_flag() as interrupted:
        for output in stream:
            text = output.outputs[0].text
            print(text[len(shown) :], end="", flush=True)
            shown = text
            if output.error is not None:
                raise GirihError(output.error)
            if interrupted:
                stream.close()  # type: ignore[attr-defined]  # a generator; aborts the request
                break
    print(flush=True)
    return shown


@contextmanager
def _interrupt_flag() -> Iterator[list[bool]]:
    """Yield a list that is empty until Ctrl-C is pressed, so that a step is never cut in the middle."""
    pressed: list[bool] = []

    def remember(number: int, frame: FrameType | None) -> None:
        pressed.append(True)

    previous = signal.signal(signal.SIGINT, remember)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, previous)
