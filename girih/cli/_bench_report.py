"""What `girih bench` found, for people, for programs and as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from girih.cli._bench_work import Figures
from girih.cli._picture import write_picture
from girih.cli._text import one_line
from girih.config import EngineConfig
from girih.errors import ConfigError
from girih.viz._figure import COLOURS
from girih.viz.bars import Bar, make_figure
from girih.viz.png import need_pillow


def check_plot(file: Path | None) -> None:
    """Refuse a picture that could not be written, before minutes are spent on its figures.

    Raises:
        ConfigError: its directory is not there, no picture has such a name, or it is a PNG and Pillow is missing.
    """
    if file is None:
        return
    if not file.parent.is_dir():
        raise ConfigError(f"cannot write --plot {file}: there is no directory {file.parent}")
    if file.suffix.lower() not in (".svg", ".png"):
        raise ConfigError(f"cannot draw --plot {file}: choose a name in .svg or .png")
    if file.suffix.lower() == ".png":
        need_pillow()


def report(benchmark: str, config: EngineConfig, figures: Figures, json_output: bool, plot: Path | None) -> None:
    """Print the figures and draw them.

    Args:
        benchmark: "throughput", "latency" or "startup".
        config: of the engine.
        figures: what the benchmark returned.
        json_output: print JSON instead of text.
        plot: the picture's file, if there is to be one.

    Raises:
        ConfigError: the picture cannot be written.
    """
    heading, lines, unit, bars = _REPORTS[benchmark](figures)
    weights = f" with {config.quantization} weights" if config.quantization else ""
    title = f"{one_line(config.model)}{weights}: {heading}"
    if json_output:
        print(json.dumps({"benchmark": benchmark, "engine": vars(config), **figures}, indent=2))
    else:
        print(title)
        for label, text in lines:
            print(f"  {label:<24}{text}")
    if plot is not None:  # last: what was measured is out, whatever becomes of the picture
        write_picture("--plot", plot, make_figure(title, unit, bars))


Report = tuple[str, list[tuple[str, str]], str, list[Bar]]  # heading, lines of text, unit of the bars, bars


def _throughput(figures: Figures) -> Report:
    lines, bars = [], []
    for i, entry in enumerate(figures["rounds"], 1):
        rate = f"{entry['output_tokens_per_s']:.1f} output tokens/s"
        lines.append((f"round {i}", f"{rate}, {entry['total_tokens_per_s']:.1f} in all, {entry['seconds']:.2f} s"))
        bars.append(Bar(f"round {i}", (("output tokens/s", entry["output_tokens_per_s"]),), rate))
    rate, in_all = figures["output_tokens_per_s"], figures["total_tokens_per_s"]
    between = f"from {rate['min']:.1f} to {rate['max']:.1f}"
    lines.append(("median", f"{rate['median']:.1f} output tokens/s ({between}), {in_all['median']:.1f} in all"))
    for rank, entry in enumerate(figures["profile"] or []):
        lines += _profile(f"worker {rank}" if len(figures["profile"]) > 1 else "a step", entry)
    return f"{_work(figures)}, all at once", lines, "output tokens/s", bars


def _profile(who: str, entry: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Say where the time of a worker's steps goes, the most first."""
    steps, whole_s = max(1, entry["num_steps"]), sum(entry["seconds"].values()) or 1.0
    count = f"{entry['num_steps']} step{'' if entry['num_steps'] == 1 else 's'}"
    lines = [(who, f"{1000 * whole_s / steps:.2f} ms, the mean of {count}")]
    for part, seconds in sorted(entry["seconds"].items(), key=lambda item: -item[1]):
        lines.append((f"  {part}", f"{1000 * seconds / steps:.2f} ms, {_share(seconds / whole_s)}"))
    return lines


def _share(share: float) -> str:
    return "<1%" if 0 < share < 0.01 else f"{share:.0%}"  # something is never nothing


def _latency(figures: Figures) -> Report:
    names = {
        "first token": "time_to_first_token_s",
        "each further one": "time_per_output_token_s",
        "between two tokens": "time_between_tokens_s",
        "whole request": "request_s",
    }
    lines = [(label, _percentiles(figures[name])) for label, name in names.items() if figures[name] is not None]
    lines.append(("throughput", f"{figures['output_tokens_per_s']:.1f} output tokens/s"))
    bars = []
    for i, one in enumerate(figures["requests_measured"], 1):
        first_s, all_s = one["time_to_first_token_s"], one["seconds"]
        parts = (("first token", first_s), ("the others", all_s - first_s))
        bars.append(Bar(f"request {i}", parts, f"{all_s:.3f} s"))
    return f"{_work(figures)}, {figures['concurrency']} at a time", lines, "s", bars


def _startup(figures: Figures) -> Report:
    lines = [(name, f"{seconds:.3f} s") for name, seconds in figures["phases_s"].items()]
    total = figures["total_s"]
    lines.append(("process to first token", f"{total['median']:.2f} s (from {total['min']:.2f} to {total['max']:.2f})"))
    entries = {f"start {i}": entry for i, entry in enumerate(figures["rounds"], 1)}
    if figures["first_start"] is not None:
        entries = {"first start": figures["first_start"], **entries}
        lines.append(("first start, compiling", f"{figures['first_start']['total_s']:.1f} s"))
    largest = sorted(figures["phases_s"], key=figures["phases_s"].get, reverse=True)[: len(COLOURS) - 1]
    bars = [Bar(name, _parts(entry, largest), f"{entry['total_s']:.2f} s") for name, entry in entries.items()]
    heading = f"{len(figures['rounds'])} starts of a fresh process, the median of each phase"
    return heading, lines, "s", bars


def _parts(entry: Mapping[str, Any], phases: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """Return so many phases of a start, in their order, and the rest of it as one."""
    shown = {name: seconds for name, seconds in entry["phases_s"].items() if name in phases}
    return (*shown.items(), ("the rest", entry["total_s"] - sum(shown.values())))


_REPORTS = {"throughput": _throughput, "latency": _latency, "startup": _startup}


def _work(figures: Figures) -> str:
    return f"{figures['requests']} x ({figures['input_tokens']} prompt + {figures['output_tokens']} output) tokens"


def _percentiles(values: Mapping[str, Any]) -> str:
    """Write seconds as milliseconds."""
    return ", ".join(f"{name} {1000 * seconds:.1f}" for name, seconds in values.items()) + " ms"
