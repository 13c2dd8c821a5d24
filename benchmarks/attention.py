"""How fast attention backends read the KV cache: decode in GB/s beside what memory gives, prefill in milliseconds.

    python benchmarks/attention.py                        every backend, shape and dtype of the cache
    python benchmarks/attention.py --backend cpu          one backend; --kv-dtype, --shape, --json for programs
    python benchmarks/attention.py --quick                small contexts: does it still work

A decode step reads every key and value once, so it can be no faster than memory. What memory gives is measured in the
same run: the sum of 512 MiB of float32. Cases take turns, and the best time of each counts, as other programs may run.
Each round a case finds the cache as it was left by all others, that is out of the processor's caches where these are
smaller than all cases together. Rows that share their first tokens read them together: these count in milliseconds,
beside as many rows that share none. The mark: `cpu` decodes at 60 % of the read bandwidth; the exit code is 1 if not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from girih import plugins
from girih.attention import AttentionBackend, GroupMetadata, KVCacheView
from girih.units import MIB

BLOCK_SIZE = 16
READ_BYTES = 512 * MIB
MARK = 0.6


@dataclass(frozen=True)
class Shape:
    """Heads of a model's attention layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int


SHAPES = {"smollm2": Shape(9, 3, 64), "gemma": Shape(4, 1, 256), "llama-8b": Shape(32, 8, 128)}
DEFAULT_SHAPES = ("smollm2", "gemma")
DTYPES = ("float32", "bfloat16", "int8")


@dataclass(frozen=True)
class Step:
    """Rows of a step, all alike.

    Args:
        rows: how many.
        computed: tokens that each has computed before.
        new: tokens that each computes.
        shared: its first tokens, that all have in common.
    """

    rows: int
    computed: int
    new: int
    shared: int = 0


STEPS = {
    "decode 16 x 1024": Step(16, 1023, 1),
    "decode 1 x 16384": Step(1, 16_383, 1),
    "decode 64 x 1024": Step(64, 1023, 1),
    "decode 64 x 1024, shared 768": Step(64, 1023, 1, shared=768),
    "prefill 512": Step(1, 0, 512),
    "prefill 2048": Step(1, 0, 2048),
    "prefill 512 after 4096": Step(1, 4096, 512),
}
QUICK_STEPS = {
    "decode 4 x 100": Step(4, 99, 1),
    "decode 4 x 100, shared 64": Step(4, 99, 1, shared=64),
    "decode 1 x 1100": Step(1, 1099, 1),
    "prefill 40 after 20": Step(1, 20, 40),
}


@dataclass
class Result:
    """One line of the table.

    Args:
        step: key of the steps.
        shape: key of `SHAPES`.
        kv_dtype: of the cache.
        backend: its name.
        milliseconds: the best time of one layer.
        gb_per_s: keys and values of the context over the best time; of decode steps that share nothing.
        fraction: of the read bandwidth.
    """

    step: str
    shape: str
    kv_dtype: str
    backend: str
    milliseconds: float
    gb_per_s: float | None = None
    fraction: float | None = None


def make_cache(shape: Shape, kv_dtype: str, num_blocks: int) -> KVCacheView:
    """Return a cache of random numbers, without scales of another kind than int8 needs."""
    generator = torch.Generator().manual_seed(0)
    size = (num_blocks + 1, BLOCK_SIZE, shape.num_kv_heads, shape.head_size)
    tensors = {}
    for name in ("key", "value"):
        if kv_dtype == "int8":
            tensors[name] = torch.randint(-127, 128, size, generator=generator, dtype=torch.int8)
            tensors[f"{name}_scale"] = torch.full(size[:-1], 0.02)
        else:
            tensors[name] = torch.randn(size, generator=generator).to(getattr(torch, kv_dtype))
    return KVCacheView(tensors, group=0, block_size=BLOCK_SIZE)


def make_step(
    backend: AttentionBackend, shape: Shape, cache: KVCacheView, step: Step
) -> tuple[Callable[[], object], int]:
    """Return a function that attends as one layer does, and the bytes of keys and values that it reads."""
    rows, computed, new = step.rows, step.computed, step.new
    width = -(-(computed + new) // BLOCK_SIZE)
    table = np.random.default_rng(0).permutation(rows * width).reshape(rows, width).astype(np.int32)
    table[:, : step.shared // BLOCK_SIZE] = table[0, : step.shared // BLOCK_SIZE]
    positions = torch.arange(computed, computed + new)
    slots = torch.from_numpy(table.astype(np.int64))[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    metadata = GroupMetadata(np.arange(rows + 1) * new, np.full(rows, computed), table, slots.ravel())
    kv_dtype = cache.tensors["key"].dtype
    dtype = torch.float32 if kv_dtype == torch.int8 else kv_dtype
    query = torch.randn(rows * new, shape.num_heads, shape.head_size).to(dtype)
    work = backend.prepare(metadata, cache, None)
    page_bytes = sum(tensor[0].nbytes for tensor in cache.tensors.values())
    read_bytes = rows * (computed + new) * page_bytes // BLOCK_SIZE
    return lambda: backend.attend(query, cache, work, shape.head_size**-0.5), read_bytes


def best_times(cases: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Return the least seconds of each; they take turns."""
    best = [float("inf")] * len(cases)
    for _ in range(rounds):
        for i, case in enumerate(cases):
            start = time.perf_counter()
            case()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def measure(
    backends: Sequence[str], shapes: Sequence[str], dtypes: Sequence[str], steps: dict[str, Step],
    read_bytes: int, rounds: int,
) -> tuple[float, list[Result]]:  # fmt: skip
    """Return the read bandwidth in GB/s and a result for each case."""
    memory = torch.ones(read_bytes // 4)
    cases: list[Callable[[], object]] = [memory.sum]
    results, sizes = [], []
    num_blocks = max(step.rows * -(-(step.computed + step.new) // BLOCK_SIZE) for step in steps.values())
    for shape in shapes:
        for kv_dtype in dtypes:
            cache = make_cache(SHAPES[shape], kv_dtype, num_blocks)
            for name, step in steps.items():
                for backend in backends:
                    module = plugins.load("girih.attention", backend, what="attention backend")
                    case, size = make_step(module, SHAPES[shape], cache, step)
                    case()  # compiles
                    cases.append(case)
                    sizes.append(size)
                    results.append(Result(name, shape, kv_dtype, backend, 0.0))
    bandwidth, *seconds = best_times(cases, rounds)
    bandwidth = memory.nbytes / bandwidth / 1e9
    for result, size, best in zip(results, sizes, seconds, strict=True):
        result.milliseconds = best * 1e3
        if result.step.startswith("decode") and not steps[result.step].shared:
            result.gb_per_s = size / best / 1e9
            result.fraction = result.gb_per_s / bandwidth
    return bandwidth, results


def print_table(bandwidth: float, results: Sequence[Result]) -> None:
    """Print a line for each case."""
    print(f"read bandwidth {bandwidth:.1f} GB/s on {torch.get_num_threads()} threads")
    print(f"{'step':30}{'shape':10}{'kv dtype':10}{'backend':12}{'ms':>9}{'GB/s':>8}{'fraction':>10}")
    for r in results:
        rate = "" if r.gb_per_s is None else f"{r.gb_per_s:8.2f}{r.fraction:10.2f}"
        print(f"{r.step:30}{r.shape:10}{r.kv_dtype:10}{r.backend:12}{r.milliseconds:9.3f}{rate}")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 if a mark is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", default=plugins.available("girih.attention"))
    parser.add_argument("--shape", nargs="+", default=DEFAULT_SHAPES, choices=SHAPES)
    parser.add_argument("--kv-dtype", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--step", default="", help="only steps whose name begins so, e.g. decode")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="small contexts, and no marks")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    steps = {
        name: step for name, step in (QUICK_STEPS if options.quick else STEPS).items() if name.startswith(options.step)
    }
    read_bytes, rounds = (MIB, 1) if options.quick else (READ_BYTES, options.rounds)
    bandwidth, results = measure(options.backend, options.shape, options.kv_dtype, steps, read_bytes, rounds)
    if options.json:
        print(json.dumps({"read_gb_per_s": bandwidth, "results": [asdict(result) for result in results]}))
    else:
        print_table(bandwidth, results)
    missed = [r for r in results if r.backend == "cpu" and r.fraction is not None and r.fraction < MARK]
    return 1 if missed and not options.quick else 0


if __name__ == "__main__":
    sys.exit(main())
