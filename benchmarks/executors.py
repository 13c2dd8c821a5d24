"""What executors cost: messages to a worker's process, and a scheduler that workers should never wait for.

    python benchmarks/executors.py                          all three questions, on SmolLM2 and Gemma 3 270M
    python benchmarks/executors.py --only scheduler         one of messages, scheduler, async
    python benchmarks/executors.py --quick | --json

messages    one worker in its own process (`multiproc`) against one on a thread (`uniproc`)
scheduler   a worker that waits 10 ms and a scheduler of 3 ms: how long is a step of 256 requests?
async       asynchronous against synchronous scheduling, with 1, 8 and 64 sequences

Whatever is compared takes turns in one run. docs/benchmarks.md says how, and what the marks are; the exit code is 1 if
one is missed. It needs `girih pull smollm2 gemma3-270m`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from engine_pairs import engine_pair, paired_seconds
from waiting_engine import waiting_engine

MODELS = ("smollm2", "gemma3-270m")
EXECUTORS = ("uniproc", "multiproc")
OUTPUT_TOKENS = {1: 32, 8: 24, 64: 12}
"""Sequences at once -> tokens that each gets in a round, which then takes a second or so."""

MIN_MULTIPROC, MIN_ASYNC, MAX_STEP_MS = 0.9, 0.97, 10.6


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Args:
        models: that generate.
        sequences: at once, in turn.
        rounds: of each comparison.
        steps: of a worker that waits, in one round.
        has_marks: whether that is enough to judge by.
    """

    models: tuple[str, ...] = MODELS
    sequences: tuple[int, ...] = tuple(OUTPUT_TOKENS)
    rounds: int = 9
    steps: int = 100
    has_marks: bool = True


@dataclass
class Figure:
    """One line of the report.

    Args:
        question: that it answers.
        case: what was run.
        values: one per round.
        unit: of the values.
        at_least: the mark of their median; None has none.
        at_most: the same, from above.
        notes: further medians, by name.
    """

    question: str
    case: str
    values: list[float]
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    notes: dict[str, float] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """Return the figure that counts."""
        return statistics.median(self.values)

    @property
    def missed(self) -> bool:
        """Tell whether the mark is missed."""
        too_small = self.at_least is not None and self.median < self.at_least
        return too_small or (self.at_most is not None and self.median > self.at_most)

    def line(self) -> str:
        """Write it for people."""
        text = f"{self.question:9}  {self.case:46} {self.median:7.3f} {self.unit:9}"
        text += f" ({min(self.values):.3f} to {max(self.values):.3f})"
        if self.at_least is not None or self.at_most is not None:
            mark = f">= {self.at_least}" if self.at_least is not None else f"<= {self.at_most}"
            text += f"  mark {mark}{', missed' if self.missed else ''}"
        return text + "".join(f"  {name} {value:.3f}" for name, value in self.notes.items())


def messages(scale: Scale) -> Iterator[Figure]:
    """Compare one worker's process with one worker's thread: steps of nothing else, then a model."""
    yield from _waiting_figures("messages", scale, num_requests=64, step_ms=0, scheduler_ms=0)
    num_sequences = max(scale.sequences)
    with engine_pair(MODELS[0], {"executor": "uniproc"}, {"executor": "multiproc"}) as pair:
        seconds = paired_seconds(
            pair,
            num_sequences=num_sequences,
            num_output_tokens=OUTPUT_TOKENS[num_sequences],
            rounds=scale.rounds,
        )
    case = f"{MODELS[0]}, {num_sequences} sequences, multiproc / uniproc"
    yield Figure("messages", case, [uni / multi for uni, multi in seconds], "ratio", at_least=MIN_MULTIPROC)


def scheduler(scale: Scale) -> Iterator[Figure]:
    """Time steps of 10 ms for the worker and 3 ms for the scheduler."""
    yield from _waiting_figures(
        "scheduler", scale, num_requests=256, step_ms=10, scheduler_ms=3, async_at_most=MAX_STEP_MS
    )


def async_scheduling(scale: Scale) -> Iterator[Figure]:
    """Compare asynchronous with synchronous scheduling on models."""
    for model in scale.models:
        for executor in EXECUTORS:
            first, second = ({"executor": executor, "async_scheduling": is_async} for is_async in (True, False))
            with engine_pair(model, first, second) as pair:
                for num_sequences in scale.sequences:
                    seconds = paired_seconds(
                        pair,
                        num_sequences=num_sequences,
                        num_output_tokens=OUTPUT_TOKENS[num_sequences],
                        rounds=scale.rounds,
                    )
                    case = f"{model}, {executor}, {num_sequences} sequences, async / sync"
                    ratios = [sync_s / async_s for async_s, sync_s in seconds]
                    yield Figure("async", case, ratios, "ratio", at_least=MIN_ASYNC)


QUESTIONS: dict[str, Callable[[Scale], Iterator[Figure]]] = {
    "messages": messages,
    "scheduler": scheduler,
    "async": async_scheduling,
}


def _waiting_figures(
    question: str,
    scale: Scale,
    *,
    num_requests: int,
    step_ms: float,
    scheduler_ms: float,
    async_at_most: float | None = None,
) -> Iterator[Figure]:
    """Time both executors with both kinds of scheduling over a worker that waits, in turns."""
    warm_up = 10
    cases = [(executor, is_async) for executor in EXECUTORS for is_async in (True, False)]
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(
                waiting_engine(
                    executor,
                    is_async=is_async,
                    num_requests=num_requests,
                    num_steps=scale.rounds * (scale.steps + warm_up),
                    step_ms=step_ms,
                    scheduler_ms=scheduler_ms,
                )
            )
            for executor, is_async in cases
        ]
        rounds = [[engine.measure(scale.steps, warm_up) for engine in engines] for _ in range(scale.rounds)]
    for (executor, is_async), found in zip(cases, zip(*rounds, strict=True), strict=True):
        yield Figure(
            question,
            f"{num_requests} requests, {executor}, {'async' if is_async else 'sync'}",
            [one["step_ms"] for one in found],
            "ms a step",
            at_most=async_at_most if is_async else None,
            notes={"in the worker": statistics.median(one["worker_ms"] for one in found)},
        )


def run(questions: Sequence[str], scale: Scale, *, as_text: bool) -> list[Figure]:
    """Answer questions, keys of `QUESTIONS`; print each figure when it is there, if `as_text`."""
    figures = []
    for question in questions:
        for figure in QUESTIONS[question](scale):
            if not scale.has_marks:
                figure.at_least = figure.at_most = None
            figures.append(figure)
            if as_text:
                print(figure.line(), flush=True)
    return figures


def main() -> int:
    """Run what the command line asks for; return 1 if a mark is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(QUESTIONS), default=list(QUESTIONS))
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="for async: pulled names or directories")
    parser.add_argument("--rounds", type=int, default=Scale.rounds)
    parser.add_argument("--quick", action="store_true", help="SmolLM2, 8 sequences, one round; no marks")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    scale = Scale(models=tuple(args.models), rounds=args.rounds)
    if args.quick:
        scale = Scale(models=MODELS[:1], sequences=(8,), rounds=1, steps=20, has_marks=False)
    figures = run(args.only, scale, as_text=not args.json)
    if args.json:
        print(json.dumps([asdict(figure) | {"median": figure.median, "missed": figure.missed} for figure in figures]))
    return 1 if any(figure.missed for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
