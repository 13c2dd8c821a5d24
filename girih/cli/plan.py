"""`girih plan MODEL`: the memory bill of a model, from its config alone; no torch, no weights."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from girih.cli._bill import make_bill
from girih.cli._options import build, with_options
from girih.cli._plan_options import PlanOptions
from girih.cli._text import one_line
from girih.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from girih.cli._bill import Bill
    from girih.kv.config import KVCacheConfig

MODEL_HELP = "A config.json, as a file or as its text; a model directory; a name `girih pull` knows; or a .gguf file."


@with_options(PlanOptions)
def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    draft: Annotated[
        Optional[str],  # noqa: UP045  # typer reads it at run time
        typer.Option(metavar="MODEL", help="A draft model beside it, for speculative decoding."),
    ] = None,
    svg: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Also draw the plan into this file; a PNG if its name ends in .png.", dir_okay=False),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON, without a picture.")] = False,
    **options: Any,
) -> None:
    """Plan and draw a model's KV cache, from its config alone.

    --memory counts weights and KV cache; the engine also measures activations when it starts. Sizes are per worker.
    """
    from girih.checkpoint.resolve import model_facts

    bill = make_bill(model_facts(model), None if draft is None else model_facts(draft), build(PlanOptions, options))
    if svg is not None:
        _draw(bill, svg)
    if json_output:
        print(json.dumps(bill.to_json(), indent=2))
    else:
        _show(bill, svg)


def _draw(bill: Bill, file: Path) -> None:
    """Draw the picture into a file."""
    from girih.cli._picture import write_picture
    from girih.viz._figure import make_figure

    memory = format_bytes(sum(len(stage["workers"]) * stage["kv_memory_bytes"] for stage in bill.figures["stages"]))
    title = f"{one_line(bill.figures['model'])}: KV cache in {memory}"
    write_picture("--svg", file, make_figure(bill.plans, title))


def _show(bill: Bill, picture_file: Path | None) -> None:
    """Print the figures and the picture for people."""
    from rich.console import Console
    from rich.text import Text

    from girih.viz import terminal

    # no markup: a directory may be called "[/b]"
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    figures = bill.figures
    console.print(Text.assemble((one_line(figures["model"]), "bold"), one_line(_headline(figures))))
    for label, text in [*_stage_lines(figures, bill.plans), *_lines(figures)]:
        console.print(f"  {label:<18}", style="bold", end="")
        console.print(text)
    for text in figures["warnings"]:
        console.print(f"  warning: {one_line(text)}")
    console.print()
    terminal.draw(bill.plans, console)
    if picture_file is not None:
        console.print(f"The picture is in {one_line(str(picture_file))}.")


def _headline(figures: dict[str, Any]) -> str:
    draft = f" with {figures['draft']} as its draft" if figures["draft"] else ""
    tokens = f", {figures['num_speculative_tokens']} draft tokens per step" if figures["num_speculative_tokens"] else ""
    quantization = f", {figures['quantization']} weights" if figures["quantization"] else ""
    kv_dtype = f", KV cache {figures['kv_dtype']}" if figures["kv_dtype"] != figures["dtype"] else ""
    return (
        f"{draft}: {figures['model_type']}, {figures['num_parameters']:,} parameters, {figures['dtype']}"
        f"{quantization}{kv_dtype}{tokens}"
    )


def _stage_lines(figures: dict[str, Any], plans: Sequence[KVCacheConfig]) -> list[tuple[str, str]]:
    """Return (label, text) of what a worker of each stage holds; stages that are alike in a row are said once."""
    lines, stages = [], figures["stages"]
    for _, alike in itertools.groupby(range(len(stages)), key=lambda index: _without_names(stages[index])):
        first, *others = alike
        stage, plan = stages[first], plans[first]
        label = "memory"
        if len(stages) > 1:
            label = f"stages {first}-{others[-1]}" if others else f"stage {first}"
        weights, cache = format_bytes(stage["weight_bytes"]), format_bytes(stage["kv_memory_bytes"])
        budget = f" = {format_bytes(figures['memory_bytes'])}" if figures["memory_bytes"] else ""
        each = len(stage["workers"]) * (1 + len(others))
        workers = f", on each of {each} workers" if each > 1 else ""
        lines.append((label, f"{weights} weights + {cache} KV cache{budget}{workers}"))
        if not stage["groups"]:
            lines.append(("KV cache", "none: no layer keeps one"))
            continue
        lines.append(("pool", _pool(stage)))
        for index, group in enumerate(stage["groups"], plan.first_group):
            lines += [(f"group {index}", _layers(group)), ("", _pages(group))]
        lines.append(("waste", f"{stage['waste']:.2%} of the KV cache's memory holds no page of the worst group"))
    return lines


def _without_names(stage: dict[str, Any]) -> dict[str, Any]:
    groups = [{**group, "layer_names": None} for group in stage["groups"]]
    return {**stage, "groups": groups, "workers": len(stage["workers"])}


def _pool(stage: dict[str, Any]) -> str:
    slabs = f"{stage['num_slabs']} slabs of {format_bytes(stage['slab_bytes'])}"
    return (
        f"{slabs}, {format_bytes(stage['null_page_bytes'])} null page, {format_bytes(stage['spare_bytes'])} left over"
    )


def _layers(group: dict[str, Any]) -> str:
    """Say which layers a group has, what they keep, and what that costs a request."""
    layers = f"{group['num_layers']} layer{'' if group['num_layers'] == 1 else 's'}"
    if group["num_sharing_layers"]:
        layers += f" (read by {group['num_sharing_layers']} more)"
    first, last = group["kv_bytes_per_token"], group["kv_bytes_per_token_at_max_model_len"]
    until = " until that is full" if first and not last else ""
    growth = f"{format_bytes(first)} per token{until}, " if first else ""
    return f"{layers}, {group['description']}: {growth}{format_bytes(group['kv_bytes_per_sequence'])} per request"


def _pages(group: dict[str, Any]) -> str:
    """Say of which pages a group's memory is made."""
    block = "a state" if group["holds_state"] else f"{group['block_size']} tokens"
    per_slab = f"{group['pages_per_slab']} per slab"
    return f"{group['num_pages']} pages of {format_bytes(group['page_bytes'])} for {block}, {per_slab}"


def _lines(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (label, text) of the answers for the whole model, in the order of a user's questions."""
    limit = figures["max_model_len"]
    lines = [
        ("longest request", f"{limit} tokens" + (" (the model's limit)" if limit == figures["model_limit"] else ""))
    ]
    counts = figures["requests_at_once"]
    if not counts:
        return lines
    first, last = figures["kv_bytes_per_token"], figures["kv_bytes_per_token_at_max_model_len"]
    more = "" if first == last else f" at first, {format_bytes(last)} at the greatest length"
    num_workers = figures["tensor_parallel_size"] * figures["pipeline_parallel_size"]
    over = f", on all {num_workers} workers together" if num_workers > 1 else ""
    lines += [
        ("KV per token", format_bytes(first) + more + over),
        ("KV per request", f"{format_bytes(figures['kv_bytes_per_sequence'])} for {limit} tokens{over}"),
        ("requests at once", ", or ".join(f"{row['requests']} x {row['tokens']} tokens" for row in counts)),
    ]
    if longest := figures.get("longest_context"):
        verdict = ""
        if "fits" in figures:
            verdict = f"{counts[0]['tokens']} tokens each {'fit' if figures['fits'] else 'do NOT fit'}; "
        lines.append((f"{longest['users']} users", f"{verdict}{longest['tokens']} tokens each at most"))
    return lines
