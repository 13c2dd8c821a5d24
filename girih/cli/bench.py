"""`girih bench`: measure the engine on this machine. One sub-command per question."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from girih.cli._options import build, with_options
from girih.config import EngineConfig

if TYPE_CHECKING:
    from girih.cli._bench_work import Figures, Progress
    from girih.engine.llm import LLM

Requests = Annotated[int, typer.Option("--requests", min=1, help="How many requests.")]
InputTokens = Annotated[int, typer.Option("--input", min=1, help="Prompt tokens of each request, drawn at random.")]
OutputTokens = Annotated[int, typer.Option("--output", min=1, help="Output tokens of each request.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="How often to measure; the median counts.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object with everything instead of text.")]
Plot = Annotated[
    Optional[Path],  # noqa: UP045  # typer reads it at run time
    typer.Option(help="Also draw the figures into this file; a PNG if its name ends in .png.", dir_okay=False),
]

command = typer.Typer(
    help="Measure throughput, latency or start-up of the engine on this machine.", rich_markup_mode=None
)


@command.command("throughput")
@with_options(EngineConfig)
def throughput(
    requests: Requests = 16,
    input_tokens: InputTokens = 128,
    output_tokens: OutputTokens = 64,
    rounds: Rounds = 3,
    profile: Annotated[bool, typer.Option("--profile", help="Also find where the time of a step goes.")] = False,
    json_output: Json = False,
    plot: Plot = None,
    **options: Any,
) -> None:
    """Measure tokens per second, prompts included.

    All requests come at once. Greedy, on random tokens, which the seed decides; every round has prompts of its own.
    """
    from girih.cli._bench_work import Work, measure_throughput

    work = Work(requests, input_tokens, output_tokens)
    measure = partial(measure_throughput, work=work, rounds=rounds, profile=profile)
    _measure("throughput", options, json_output, plot, measure)


@command.command("latency")
@with_options(EngineConfig)
def latency(
    requests: Requests = 16,
    input_tokens: InputTokens = 128,
    output_tokens: OutputTokens = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in progress at any time.")] = 1,
    json_output: Json = False,
    plot: Plot = None,
    **options: Any,
) -> None:
    """Measure the time to a first token, and to each further one.

    A request comes when another has ended. Greedy, on random tokens, which the seed decides.
    """
    from girih.cli._bench_work import Work, measure_latency

    work = Work(requests, input_tokens, output_tokens)
    _measure("latency", options, json_output, plot, partial(measure_latency, work=work, concurrency=concurrency))


@command.command("startup")
@with_options(EngineConfig)
def startup(
    rounds: Rounds = 5,
    cold: Annotated[
        bool, typer.Option("--cold", help="First time a start with nothing compiled, as after an installation.")
    ] = False,
    json_output: Json = False,
    plot: Plot = None,
    **options: Any,
) -> None:
    """Measure the time from a process' start to its first token."""
    config = build(EngineConfig, options)

    from girih.cli._bench_report import check_plot, report
    from girih.cli._bench_startup import measure_startup
    from girih.cli._progress import find_model, stage_bar

    check_plot(plot)
    find_model(config.model)
    with stage_bar() as bar:
        figures = measure_startup(config, rounds, cold, bar.update)
    report("startup", config, figures, json_output, plot)


def _measure(
    benchmark: str,
    options: Mapping[str, Any],
    json_output: bool,
    plot: Path | None,
    measure: Callable[[LLM, Progress], Figures],
) -> None:
    """Start an engine, measure it and say what was found."""
    config = build(EngineConfig, options)

    from girih.cli._bench_report import check_plot, report
    from girih.cli._progress import find_model, stage_bar
    from girih.engine.llm import LLM

    check_plot(plot)
    find_model(config.model)
    with stage_bar() as bar:
        bar.update(f"loading {config.model}", 0, 1)
        with LLM(**vars(config)) as llm:
            figures = measure(llm, bar.update)
    report(benchmark, config, figures, json_output, plot)
