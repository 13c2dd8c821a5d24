"""The `girih` command: one file in this package per sub-command, found by name.

A command file defines `command`, a function with typer annotations whose docstring is its help, or a `typer.Typer`
with sub-commands of its own; what is heavy (torch, tokenizers, numba) is imported inside the function, so that `--help`
and `plan` start at once.
"""

import importlib
import io
import os
import sys
from typing import Annotated

import typer

import girih
from girih import plugins
from girih.cli._text import one_line
from girih.errors import GirihError

EXIT_BAD_INPUT = 2
UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[
    1
]  # of the click that this typer comes with: a wrong command line

HELP = """Girih: an LLM inference engine whose KV cache is planned by the engine core.

Not in this version: CUDA, LoRA, KV offload, multimodal input, embeddings.
"""


def build_app(called: str | None) -> typer.Typer:
    """Collect the commands; every file of this package but this one is a command.

    Args:
        called: the first argument of the command line; if it names a command, only that one is imported.
    """
    app = typer.Typer(  # without rich's boxes, which cut long option names on a narrow terminal
        help=HELP, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
    )
    app.callback()(_common_options)
    names = [name for name in plugins.available("girih.cli") if name != "main"]
    for name in [called] if called in names else names:
        command = importlib.import_module(f"girih.cli.{name}").command
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def _print_version(asked: bool) -> None:
    if asked:
        print(f"girih {girih.__version__}")
        raise typer.Exit


def _common_options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Take the options before the command; with one, a lone command stays a sub-command."""


def main() -> None:
    """Run the command line; bad input is one line on stderr and exit code 2, output that cannot be written code 1."""
    arguments = sys.argv[1:]
    called = arguments[0] if arguments else None
    is_bare = not arguments or (len(arguments) == 1 and called in plugins.available("girih.cli"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows "?"
    try:
        code = build_app(called)([*arguments, "--help"] if is_bare else arguments, standalone_mode=False)
        sys.stdout.flush()
        sys.exit(EXIT_BAD_INPUT if is_bare else code or 0)
    except GirihError as error:
        message = str(error)
    except UsageError as error:
        message = error.format_message()
        known = f" {called}" if called in plugins.available("girih.cli") else ""
        message = f"{message.rstrip('.')}; see girih{known} --help"
    except OSError as error:  # of standard output: errors of files that the user named are GirihErrors
        print(f"girih: cannot write the output: {error}", file=sys.stderr)
        os._exit(1)  # without another try to flush
    print(f"girih: {one_line(message)}", file=sys.stderr)
    sys.exit(EXIT_BAD_INPUT)


if __name__ == "__main__":
    main()
