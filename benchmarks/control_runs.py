"""Runs the control plane's workloads, vLLM's in alternation, and holds the figures against their marks."""

from __future__ import annotations

import gc
import json
import subprocess
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from control_plane import ManagerAdapter, make_adapter
from control_workloads import KINDS, SCHED, workload
from families import GEMMA_3_12B, LLAMA_3_8B, Layer
from op_streams import batch_steps
from timing import CLOCKS, loop_seconds, quiet_seconds, timed_run

from girih.kv import KVCacheSpec
from girih.messages import StepInput, StepOutput
from girih.request import SamplingParams
from girih.sched.policies import fcfs
from girih.sched.request_state import RequestState
from girih.sched.scheduler import Scheduler

LAYERS: dict[str, tuple[Layer, ...]] = {"plain": LLAMA_3_8B, "hybrid": GEMMA_3_12B}
VLLM_SERVER = Path(__file__).parent / "vllm_control.py"


@dataclass
class Measured:
    """The runs of one workload on one engine.

    Args:
        name: the workload.
        segments: per run, nanoseconds of each segment of the stream; for the scheduler, of each step.
        loop_s: seconds that the loop around the engine takes.
        hit_tokens: tokens found cached; None for the scheduler.
        batch: requests of each step, for the scheduler.
    """

    name: str
    segments: list[list[int]] = field(default_factory=list)
    loop_s: float = 0.0
    hit_tokens: int | None = None
    batch: list[int] = field(default_factory=list)

    def add(self, answer: dict[str, Any]) -> None:
        """Add a run, in the words of `vllm_control.py`."""
        self.segments.append(answer.get("segments") or answer["step_ns"])
        self.loop_s = answer.get("loop_s", 0.0)
        self.hit_tokens = answer.get("hit_tokens")
        self.batch = answer.get("batch", [])

    @property
    def seconds(self) -> float:
        """Return the time of the whole workload; for the scheduler the median step with every request running."""
        if not self.batch:
            return quiet_seconds(self.segments) - self.loop_s
        steps = np.min(self.segments, axis=0)
        return float(np.median(steps[np.array(self.batch) == SCHED.num_requests])) / 1e9

    def report(self, num_row_steps: int) -> dict[str, Any]:
        """Return the figures; microseconds per (request, decode step) where there are any."""
        whole = [round(sum(run) / 1e6, 3) for run in self.segments]
        figures: dict[str, Any] = {"ms": self.seconds * 1e3, "whole_runs_ms": whole}
        if num_row_steps:
            figures["us_per_row_step"] = self.seconds * 1e6 / num_row_steps
        if self.hit_tokens is not None:
            figures["hit_tokens"] = self.hit_tokens
        return figures


class Workload:
    """One workload on this engine.

    Args:
        name: a key of `KINDS`.
        quick: the small one.
        clock: "wall" or "cpu".
    """

    def __init__(self, name: str, quick: bool, clock: str = "wall"):
        self.name, self.quick, self.clock = name, quick, clock
        self.layers = LAYERS[KINDS[name]]
        self.specs: dict[str, KVCacheSpec] = {f"layer.{i}": layer.spec for i, layer in enumerate(self.layers)}
        self.token_bytes = sum(layer.token_bytes for layer in self.layers)
        self.stream = None if name.startswith("sched") else workload(name, quick)

    @property
    def num_row_steps(self) -> int:
        """Return (request, decode step) pairs of the workload, or of one step of the scheduler."""
        return self.stream.num_row_steps if self.stream else SCHED.num_requests

    @cached_property
    def ops(self) -> list[tuple[Any, ...]]:
        """Return the operations, consecutive STEPs merged."""
        assert self.stream is not None
        return batch_steps(self.stream.ops)

    @cached_property
    def loop_s(self) -> float:
        """Return what the loop around the engine takes."""
        return loop_seconds(self.ops, self.clock)

    def adapter(self) -> ManagerAdapter:
        """Return an empty cache for the stream."""
        stream = self.stream
        assert stream is not None
        return make_adapter(
            self.specs,
            stream.pool_tokens * self.token_bytes,
            max_model_len=stream.max_model_len,
            max_num_seqs=stream.max_num_seqs,
        )

    def run(self) -> dict[str, Any]:
        """Run once; answer in the words of `vllm_control.py`."""
        if self.stream is None:
            return scheduler_run(self)
        adapter = self.adapter()
        segments, hit_tokens = timed_run(adapter, self.ops, self.clock)
        return {"segments": segments, "loop_s": self.loop_s, "hit_tokens": hit_tokens}


def scheduler_run(workload: Workload) -> dict[str, Any]:
    """Decode SCHED's requests to their end; return each step's time (schedule, update, reports) and batch."""
    adapter = make_adapter(
        workload.specs,
        SCHED.pool_tokens * workload.token_bytes,
        max_model_len=SCHED.max_model_len,
        max_num_seqs=SCHED.num_requests,
    )
    scheduler = Scheduler(
        adapter.manager,
        fcfs.order,
        max_num_seqs=SCHED.num_requests,
        max_num_batched_tokens=SCHED.max_num_batched_tokens,
    )
    for rid, prompt in enumerate(SCHED.prompts()):
        scheduler.add(
            RequestState(
                request_id=str(rid),
                prompt_token_ids=np.array(prompt, dtype=np.int32),
                sampling_params=SamplingParams(seed=0, max_tokens=SCHED.num_output(workload.quick), ignore_eos=True),
                max_output_tokens=SCHED.num_output(workload.quick),
            )
        )
    rng, now = np.random.default_rng(5), CLOCKS[workload.clock]
    step_ns, batch = [], []
    gc.collect()
    gc.freeze()
    while scheduler.has_unfinished():
        begin = now()
        step = scheduler.schedule()
        scheduled = now()
        assert step is not None, "requests wait and nothing runs"
        output = _sample(step, rng)
        resumed = now()
        scheduler.update(step, output)
        scheduler.take_updates()
        step_ns.append(scheduled - begin + now() - resumed)
        batch.append(len(step.rows))
    gc.unfreeze()
    return {"step_ns": step_ns, "batch": batch}


def _sample(step: StepInput, rng: np.random.Generator) -> StepOutput:
    rows = step.rows[step.samples]
    return StepOutput(step.step_id, rows, rng.integers(1000, 120_000, len(rows), dtype=np.int32))


class Vllm:
    """vLLM in its own process; used as a context."""

    def __init__(self, python: str):
        try:
            self._process = subprocess.Popen(
                [python, str(VLLM_SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        except OSError as error:
            raise SystemExit(f"--vllm-python {python}: {error}") from error

    def __enter__(self) -> Vllm:
        """Return itself."""
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def run(self, name: str, quick: bool, clock: str) -> dict[str, Any]:
        """Run a workload once.

        Raises:
            SystemExit: vLLM's process has ended; what it printed is above.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"workload": name, "quick": quick, "clock": clock}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"vLLM's process ended in workload {name}")
        return json.loads(line)


@dataclass(frozen=True)
class Mark:
    """One condition: value <= limit, or value >= limit.

    Args:
        what: in words.
        value: what was measured.
        limit: what is asked.
        at_least: which of the two.
    """

    what: str
    value: float
    limit: float
    at_least: bool

    @property
    def missed(self) -> bool:
        """Tell whether it does not hold."""
        return self.value < self.limit if self.at_least else self.value > self.limit


def marks_of(ours: dict[str, Measured], vllm: dict[str, Measured]) -> list[Mark]:
    """Return the marks that these figures allow to judge."""
    ratio = {name: theirs.seconds / ours[name].seconds for name, theirs in vllm.items()}
    faster = {"W1": 70.0, "W3": 8.0, "W4": 3.75, "sched": 15.0, "sched-hybrid": 15.0}
    marks = [
        Mark(f"{name}: times faster than vLLM", ratio[name], limit, at_least=True)
        for name, limit in faster.items()
        if name in ratio
    ]
    if "W1" in ours and "W2" in ours:
        marks.append(Mark("W2: times own W1", ours["W2"].seconds / ours["W1"].seconds, 2.0, at_least=False))
    for name in ("W3", "W3H"):
        if name in vllm:
            hits = ours[name].hit_tokens or 0, vllm[name].hit_tokens or 0
            marks.append(Mark(f"{name}: hit tokens, at least vLLM's", *hits, at_least=True))
    return marks


@dataclass
class Comparison:
    """All runs of one call of the program.

    Args:
        reps: runs of each workload on each engine, in turns.
        quick: the small workloads.
        clock: "wall" or "cpu".
        vllm: vLLM's process, or None for this engine alone.
    """

    reps: int
    quick: bool
    clock: str
    vllm: Vllm | None
    ours: dict[str, Measured] = field(default_factory=dict)
    theirs: dict[str, Measured] = field(default_factory=dict)

    def run(self, name: str) -> dict[str, Any]:
        """Run one workload; return {"girih": figures, "vllm": figures, "times_faster"}."""
        work = Workload(name, self.quick, self.clock)
        work.run()  # compile
        ours, theirs = Measured(name), Measured(name)
        for _ in range(self.reps):
            ours.add(work.run())
            if self.vllm:
                theirs.add(self.vllm.run(name, self.quick, self.clock))
        self.ours[name] = ours
        entry: dict[str, Any] = {"girih": ours.report(work.num_row_steps)}
        if self.vllm:
            self.theirs[name] = theirs
            entry["vllm"] = theirs.report(work.num_row_steps)
            entry["times_faster"] = theirs.seconds / ours.seconds
        return entry


def run_all(
    names: Sequence[str], *, reps: int, quick: bool, clock: str, vllm_python: str | None, as_text: bool
) -> dict[str, Any]:
    """Run workloads, each `reps` times on both engines in turns.

    Args:
        names: of the workloads; all for none.
        reps: runs of each.
        quick: the small workloads.
        clock: "wall" or "cpu".
        vllm_python: a Python that has vLLM, or None.
        as_text: print while it goes.

    Returns:
        {"workloads": {name: entry of `Comparison.run`}, "marks": [...]}; no marks if quick.

    Raises:
        SystemExit: an unknown workload.
    """
    unknown = sorted(set(names) - KINDS.keys())
    if unknown:
        raise SystemExit(f"unknown workload {', '.join(unknown)}; there are {', '.join(KINDS)}")
    entries: dict[str, Any] = {}
    with Vllm(vllm_python) if vllm_python else nullcontext() as vllm:
        comparison = Comparison(reps, quick, clock, vllm)
        for name in KINDS:
            if name in names or not names:
                entries[name] = comparison.run(name)
                if as_text:
                    print(format_entry(name, entries[name]), flush=True)
    marks = [] if quick else marks_of(comparison.ours, comparison.theirs)
    for mark in marks if as_text else ():
        verdict, sign = "SHORT" if mark.missed else "ok", ">=" if mark.at_least else "<="
        print(f"{verdict:5} {mark.what}: {mark.value:,.2f} (mark {sign} {mark.limit:,.2f})")
    return {"workloads": entries, "marks": [{**vars(mark), "missed": mark.missed} for mark in marks]}


def format_entry(name: str, entry: dict[str, Any]) -> str:
    """Return the lines of one workload."""
    lines = []
    for engine in ("girih", "vllm"):
        if engine in entry:
            figures = entry[engine]
            line = f"{name:12} {engine:6} {figures['ms']:10.3f} ms"
            if "us_per_row_step" in figures:
                line += f", {figures['us_per_row_step']:.3f} us per (request, step)"
            if "hit_tokens" in figures:
                line += f", {figures['hit_tokens']:,} hit tokens"
            lines.append(line)
    if "times_faster" in entry:
        lines.append(f"{name:12} {entry['times_faster']:.2f} times faster")
    return "\n".join(lines)
