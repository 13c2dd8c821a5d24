"""Output tokens per second of Girih, transformers, vLLM and llama.cpp on the same work, in turns.

    python benchmarks/peers.py                                          SmolLM2, 16 x (128 + 64), beside transformers
    python benchmarks/peers.py --model gemma3-270m --requests 1
    python benchmarks/peers.py --vllm-python PATH --llamacpp-python PATH --gguf FILE
    python benchmarks/peers.py --requests 64 --input 1024 --shared 768 --output 128 --kv-cache-gib 2  a prefix in common
    python benchmarks/peers.py --variants girih-int8 llamacpp --llamacpp-python PATH --gguf FILE --json

Greedy, random prompts, prefill included. Each engine has a process of its own, and start-up does not count. In every
alternation each has one turn, in which the others stand still: a short round that does not count, then `--rounds`
rounds, of which the median counts. Who begins changes from one alternation to the next. A ratio compares two figures
of one alternation; the median of the ratios counts. docs/performance.md says how to get the peers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from peer_process import PeerProcess, Variant

from girih.checkpoint.hf_config import load_config
from girih.checkpoint.resolve import resolve_model

FLOAT32, BFLOAT16 = {"dtype": "float32"}, {"dtype": "bfloat16"}

VARIANTS = {
    "girih-float32": Variant("girih", FLOAT32),
    "girih-bfloat16": Variant("girih", BFLOAT16),
    "girih-int8": Variant("girih", {"quantization": "int8"}),
    "transformers-float32": Variant("transformers", FLOAT32),
    "transformers-bfloat16": Variant("transformers", BFLOAT16),
    "vllm-float32": Variant("vllm", FLOAT32, {"VLLM_CPU_OMP_THREADS_BIND": "CORES"}),
    "vllm-float32-auto": Variant("vllm", FLOAT32),  # leaves one core to its other processes
    "vllm-bfloat16": Variant("vllm", BFLOAT16, {"VLLM_CPU_OMP_THREADS_BIND": "CORES"}),
    "llamacpp": Variant("llamacpp", {}),
}
"""What can be compared. CORES in a variable stands for the cores that may be used, such as 0,1."""

DEFAULT_VARIANTS = (
    "girih-float32",
    "girih-bfloat16",
    "girih-int8",
    "transformers-float32",
    "vllm-float32",
    "llamacpp",
)
WARM_UP_TOKENS = 4
BEST, BEST_FLOAT32 = "best peer", "best float32 peer"


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Start the engines, let them take turns, and return what was found, ready for JSON."""
    pythons = _pythons(args)
    names = [name for name in args.variants or DEFAULT_VARIANTS if VARIANTS[name].engine in pythons]
    if args.variants and len(names) < len(args.variants):
        missing = sorted(set(args.variants) - set(names))
        raise SystemExit(f"{', '.join(missing)}: give --vllm-python, or --llamacpp-python with --gguf")
    directory = resolve_model(args.model)
    work = {"model": str(directory), "gguf": args.gguf, "threads": args.threads}
    work |= {name: getattr(args, name) for name in ("requests", "input", "shared", "output", "kv_cache_gib")}
    vocab_size = load_config(directory)["vocab_size"]
    rng = random.Random(0)
    rates: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        peers = {}
        for name in names:
            peers[name] = _start(name, pythons, work, args.threads)
            stack.callback(peers[name].close)
            _say(f"{name} is ready after {peers[name].startup_s:.1f} s")
        for turn in range(args.alternations):
            rounds = [_prompts(args, vocab_size, rng) for _ in range(1 + args.rounds)]
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                seconds = peers[name].seconds(rounds, args.output, min(args.output, WARM_UP_TOKENS))
                rates[name].append(args.requests * args.output / statistics.median(seconds))
                each = " ".join(f"{args.requests * args.output / value:.1f}" for value in seconds)
                _say(f"alternation {turn + 1}: {name:<22} {rates[name][-1]:8.1f} tokens/s ({each})")
    return {
        "work": {**work, "alternations": args.alternations, "rounds": args.rounds},
        "engines": {
            name: {**_spread(rates[name]), "tokens_per_s": rates[name], "startup_s": peers[name].startup_s}
            for name in names
        },
        "ratios": ratios(rates),
    }


def ratios(rates: Mapping[str, Sequence[float]]) -> dict[str, dict[str, dict[str, float]]]:
    """Compare every variant of Girih with every peer, and with the best of them.

    Args:
        rates: variant -> tokens per second, in order of alternation.

    Returns:
        Variant of Girih -> peer -> median, least and greatest ratio.
    """
    peers = {name: list(values) for name, values in rates.items() if VARIANTS[name].engine != "girih"}
    float32 = [values for name, values in peers.items() if VARIANTS[name].options == FLOAT32]
    found = {}
    if float32:
        found[BEST_FLOAT32] = [max(values) for values in zip(*float32, strict=True)]
    if peers:
        found[BEST] = [max(values) for values in zip(*peers.values(), strict=True)]
    return {
        name: {
            peer: _spread([mine / theirs for mine, theirs in zip(values, other, strict=True)])
            for peer, other in {**peers, **found}.items()
        }
        for name, values in rates.items()
        if VARIANTS[name].engine == "girih"
    }


def _pythons(args: argparse.Namespace) -> dict[str, str]:
    """Return engine -> Python, of those that there is one for."""
    pythons = {"girih": sys.executable, "transformers": sys.executable}
    if args.vllm_python:
        pythons["vllm"] = args.vllm_python
    if args.llamacpp_python:
        if not args.gguf:
            raise SystemExit("--llamacpp-python needs --gguf FILE: the model for llama.cpp")
        pythons["llamacpp"] = args.llamacpp_python
    return pythons


def _start(name: str, pythons: Mapping[str, str], work: Mapping[str, Any], threads: int) -> PeerProcess:
    variant = VARIANTS[name]
    cores = ",".join(map(str, itertools.islice(sorted(os.sched_getaffinity(0)), threads)))
    environment = {key: value.replace("CORES", cores) for key, value in variant.environment.items()}
    environment["OMP_NUM_THREADS"] = str(threads)
    openmp = Path(pythons[variant.engine]).parent.parent / "lib" / "libiomp5.so"
    if variant.engine == "vllm" and openmp.exists():
        environment["LD_PRELOAD"] = str(openmp)  # as vLLM recommends; it comes with it
    return PeerProcess(name, Variant(variant.engine, variant.options, environment), pythons[variant.engine], work)


def _prompts(args: argparse.Namespace, vocab_size: int, rng: random.Random) -> list[list[int]]:
    """Draw prompts of ordinary tokens, some shared; control tokens come first in the vocabularies of these models."""

    def draw(num_tokens: int) -> list[int]:
        return [rng.randrange(vocab_size // 100, vocab_size) for _ in range(num_tokens)]

    shared = draw(args.shared)
    return [shared + draw(args.input - args.shared) for _ in range(args.requests)]


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print(found: Mapping[str, Any]) -> None:
    print(f"{'':<24}{'tokens/s':>10}{'from':>9}{'to':>9}{'ready after':>13}")
    for name, entry in found["engines"].items():
        print(f"{name:<24}{entry['median']:10.1f}{entry['min']:9.1f}{entry['max']:9.1f}{entry['startup_s']:11.1f} s")
    for name, others in found["ratios"].items():
        print(f"\n{name}, times as fast as")
        for peer, entry in others.items():
            print(f"  {peer:<24}{entry['median']:8.2f}   (from {entry['min']:.2f} to {entry['max']:.2f})")


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a pulled name or a Hugging Face directory")
    parser.add_argument("--requests", type=int, default=16, help="at once")
    parser.add_argument("--input", type=int, default=128, help="prompt tokens per request")
    parser.add_argument(
        "--shared",
        type=int,
        default=0,
        help="first tokens that all prompts have in common; Girih and vLLM cache them then",
    )
    parser.add_argument("--output", type=int, default=64, help="output tokens per request")
    parser.add_argument("--kv-cache-gib", type=int, default=1, help="KV cache of Girih and vLLM")
    parser.add_argument("--alternations", type=int, default=3, help="turns of each engine")
    parser.add_argument("--rounds", type=int, default=2, help="measured rounds of a turn")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each engine")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, help="default: one of each that there is a Python for"
    )
    parser.add_argument("--vllm-python", help="a Python with vLLM")
    parser.add_argument("--llamacpp-python", help="a Python with xllamacpp")
    parser.add_argument("--gguf", type=lambda name: str(Path(name).resolve()), help="the model for llama.cpp")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for name in ("requests", "input", "output", "alternations", "rounds", "threads", "kv_cache_gib"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    if not 0 <= args.shared < args.input:
        parser.error(f"--shared {args.shared} must be less than --input {args.input}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # and no engine is left behind
    found = measure(args)
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        _print(found)


if __name__ == "__main__":
    main()
