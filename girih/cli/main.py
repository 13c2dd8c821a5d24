"""The `girih` command: one file in this package per sub-command, found by name.

A command file defines `command`, a function with typer annotations whose docstring is its help; it imports
what is heavy (torch, tokenizers, numba) inside the function, so that `--help` and `plan` start at once.
"""

import importlib
import sys

import typer

from girih import plugins
from girih.errors import GirihError

EXIT_BAD_INPUT = 2
UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]  # of the click that this typer comes with: a wrong command line

HELP = """Girih: an LLM inference engine whose KV cache is planned by the engine core.

Not in this version: CUDA, LoRA, KV offload, multimodal input, embeddings.
"""


def build_app(called: str | None) -> typer.Typer:
    """Collect the commands; every file of this package but this one is a command.

    Args:
        called: the first argument of the command line; if it names a command, only that one is imported.
    """
    app = typer.Typer(help=HELP, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(lambda: None)  # keeps a lone command a sub-command
    names = [name for name in plugins.available("girih.cli") if name != "main"]
    for name in [called] if called in names else names:
        app.command(name, no_args_is_help=True)(importlib.import_module(f"girih.cli.{name}").command)
    return app


def main() -> None:
    """Run the command line; bad input is one line on stderr and exit code 2."""
    called = sys.argv[1] if len(sys.argv) > 1 else None
    try:
        sys.exit(build_app(called)(standalone_mode=False) or 0)
    except GirihError as error:
        message = str(error)
    except UsageError as error:
        message = error.format_message()
        if not message:  # no arguments: the help was shown
            sys.exit(EXIT_BAD_INPUT)
        known = f" {called}" if called in plugins.available("girih.cli") else ""
        message = f"{message.rstrip('.')}; see girih{known} --help"
    print(f"girih: {message}", file=sys.stderr)
    sys.exit(EXIT_BAD_INPUT)


if __name__ == "__main__":
    main()
