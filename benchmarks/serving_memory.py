"""The memory of an engine before and while it serves, against what it should need.

    python benchmarks/serving_memory.py                                 SmolLM2, 16 x (128 + 64)
    python benchmarks/serving_memory.py --option dtype=float32 --json

Three fresh processes, and the resident set of each: one that only imports and loads the tokenizer; one with an engine
of a given KV cache; one with an engine that measures the memory itself, whose prediction is compared with its peak.
docs/benchmarks.md names the marks; the exit code is 1 if one is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from girih.device import cpu
from girih.kv.capacity import peak_pages, slabs_needed
from girih.units import MIB, format_bytes, parse_bytes

MAX_SERVING_BYTES, MAX_BEFORE, MAX_PREDICTION_ERROR = 200 * MIB, 1.15, 0.10


@dataclass(frozen=True)
class Line:
    """One line of the report.

    Args:
        name: what was measured.
        value: in bytes, or a share.
        limit: it may have at most; None if it is not judged.
        is_share: of 1, not bytes.
    """

    name: str
    value: float
    limit: float | None = None
    is_share: bool = False

    @property
    def missed(self) -> bool:
        """Tell whether it is above its limit."""
        return self.limit is not None and self.value > self.limit

    def __str__(self) -> str:
        """Return it as text, with its limit and how it was judged."""
        form = "{:.3f}".format if self.is_share else format_bytes
        text = f"{self.name:<52}{form(self.value):>12}"
        if self.limit is None:
            return text
        return f"{text}   at most {form(self.limit)}: {'short' if self.missed else 'pass'}"


def report(imports_bytes: int, given: dict[str, int], measured: dict[str, int]) -> list[Line]:
    """Judge what the three processes found.

    Args:
        imports_bytes: of the process that only imports and loads the tokenizer.
        given: what `serve` returns for an engine with a given KV cache.
        measured: what it returns for one that measures.
    """
    weights, pool = measured["weights_bytes"], given["pool_bytes"]
    touched = given["touched_pool_bytes"]
    serving = given["peak_bytes"] - given["before_bytes"]
    return [
        Line("imports and tokenizer", imports_bytes),
        Line("weights as loaded", weights),
        Line("pool", pool),
        Line("resident before the first request", given["before_bytes"]),
        Line(
            "the same / (weights + pool + imports and tokenizer)",
            given["before_bytes"] / (weights + pool + imports_bytes),
            MAX_BEFORE,
            is_share=True,
        ),
        Line(
            "the same / (weights + imports and tokenizer)",
            given["before_bytes"] / (weights + imports_bytes),
            is_share=True,
        ),
        Line("peak while serving, above that", serving, MAX_SERVING_BYTES),
        Line("of it, pages of the pool used for the first time", touched),
        Line("predicted peak of an engine that measures", measured["predicted_bytes"]),
        Line("its measured peak", measured["peak_bytes"]),
        Line(
            "difference / measured peak",
            abs(measured["predicted_bytes"] - measured["peak_bytes"]) / measured["peak_bytes"],
            MAX_PREDICTION_ERROR,
            is_share=True,
        ),
    ]


def imports(args: argparse.Namespace) -> dict[str, int]:
    """Import what an engine imports, load the tokenizer, and return the resident set."""
    import girih.engine.llm
    import girih.executor.uniproc
    import girih.worker.worker  # noqa: F401
    from girih import plugins
    from girih.checkpoint.resolve import resolve_model
    from girih.checkpoint.tokenizer import Tokenizer

    backend = dict(args.option).get("attention_backend", cpu.attention_backend())
    plugins.load("girih.attention", backend, what="attention backend")
    tokenizer = Tokenizer.from_directory(resolve_model(args.model))
    tokenizer.encode("Once upon a time")
    return {"imports_bytes": cpu.process_bytes()}


def serve(args: argparse.Namespace) -> dict[str, int]:
    """Start an engine, serve the requests, and return what it held.

    Their prompts fill one step, and all decode in one step: no step of this engine can need more. The prediction is
    what it measured at start-up, plus the pages of the pool that the requests use.
    """
    from girih import LLM, SamplingParams

    largest = {"max_num_batched_tokens": args.requests * args.input, "max_num_seqs": args.requests}
    memory = parse_bytes(args.kv_cache_memory) if args.given else None
    with LLM(args.model, kv_cache_memory=memory, **{**largest, **dict(args.option)}) as llm:
        (plan,) = llm.kv_cache_configs
        prompts = [[(31 * i + 7 * j) % 1000 + 100 for j in range(args.input)] for i in range(args.requests)]
        before = cpu.process_bytes()
        cpu.reset_peak()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=args.output, ignore_eos=True))
        found = {"before_bytes": before, "peak_bytes": cpu.peak_process_bytes(), "pool_bytes": plan.total_bytes}
        pages = [args.requests * pages for pages in peak_pages(plan.groups, args.input + args.output)]
        used = slabs_needed(pages, plan.groups) * plan.slab_bytes
        found["touched_pool_bytes"] = used
        if not args.given:
            (bill,) = llm.startup_report.memory
            found["weights_bytes"] = bill.weights_bytes
            found["predicted_bytes"] = bill.weights_bytes + bill.overhead_bytes + bill.activations_bytes + used
        return found


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, int]]] = {"imports": imports, "serve": serve}
"""What a process of its own does."""


def run(part: str, *arguments: str) -> dict[str, int]:
    """Let a fresh process do a part and return what it found."""
    command = [sys.executable, __file__, *arguments, "--part", part]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a pulled name or a Hugging Face directory")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--input", type=int, default=128, help="prompt tokens per request")
    parser.add_argument("--output", type=int, default=64, help="output tokens per request")
    parser.add_argument("--kv-cache-memory", default="256MiB", help="of the engine whose KV cache is given")
    parser.add_argument("--option", type=_option, action="append", default=[], help="of both engines, name=value")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--given", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Measure, report, and return the exit code."""
    args = parse(arguments)
    if args.part:
        print(json.dumps(PARTS[args.part](args)))
        return 0
    imports_bytes = run("imports", *arguments)["imports_bytes"]
    lines = report(imports_bytes, run("serve", *arguments, "--given"), run("serve", *arguments))
    if args.json:
        print(json.dumps([{**asdict(line), "missed": line.missed} for line in lines], indent=2))
    else:
        print(*lines, sep="\n")
    return int(any(line.missed for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
