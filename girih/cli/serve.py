"""`girih serve MODEL`: an OpenAI-compatible server."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from girih.cli._options import build, with_options
from girih.cli._progress import find_model
from girih.config import EngineConfig
from girih.server.config import ServerConfig

MODEL_HELP = "A directory in Hugging Face format, a .gguf file, or a name that `girih pull` knows."


@with_options(ServerConfig, EngineConfig)
def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    **options: Any,
) -> None:
    """Serve a model over HTTP, as OpenAI's API does.

    SIGTERM lets requests finish, a second one ends them. Exit code 0: all were answered; 1: the engine died; 3: some
    requests were ended.
    """
    engine_config = build(EngineConfig, {**options, "model": model})
    config = build(ServerConfig, options)
    find_model(model)

    from girih.server.logs import set_up_logs
    from girih.server.serve import serve

    set_up_logs(config.log_format)
    code = serve(engine_config, config, model)
    sys.stdout.flush()
    raise typer.Exit(code)
