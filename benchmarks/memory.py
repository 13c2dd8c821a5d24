"""How much of a pool is usable and how many requests it holds: every family of `families.py`, by the real manager.

    python benchmarks/memory.py                  every family in 40 GiB, at five lengths and five mixes of lengths
    python benchmarks/memory.py --churn          arrivals and departures with the lengths of real conversations
    python benchmarks/memory.py --quick          small pools and few lengths: does it still work
    python benchmarks/memory.py --family 2a 8b   some of them; --json for programs

Only bookkeeping is done; no byte of the pool exists. docs/benchmarks.md says what is counted and what the marks are.
The exit code is 1 if a mark is missed.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from churn import Churn, ChurnResult
from families import Family, choose
from filling import PagesOfLength, fill, ideal_requests, mean_requests, usable
from pools import plan_pool

from girih.kv import KVCacheConfig
from girih.units import GIB

VLLM_FILE = Path(__file__).parent / "data" / "vllm_memory.csv"
LENGTHS = (100, 1000, 8192, 32_768, 131_072)
MIXES: dict[str, dict[int, int]] = {  # length -> parts of 20
    "chat": {1000: 14, 8192: 5, 32_768: 1},
    "short": {100: 10, 1000: 8, 8192: 2},
    "long": {8192: 10, 32_768: 6, 131_072: 4},
}
IDEAL_SHARE = 0.97
"""Requests at once: at least this share of the ideal's, rounded down."""

USABLE_MARK, USABLE_MARK_SHORT, SHORT_TOKENS = 0.97, 0.88, 1000
CHURN_MARK = 0.95
POOL_BYTES = 40 * GIB
QUICK_POOL_BYTES, QUICK_MAX_MODEL_LEN, QUICK_LOADS = 4 * GIB, 8192, ("100", "1000", "U[32,2048]")
SCALES, QUICK_SCALES = (1, 4, 16), (1,)


@dataclass
class Row:
    """One line of the table: a family under a load.

    Args:
        family: its key.
        load: a length in tokens, or the name of a mix.
        usable: live / held bytes with all requests at their length.
        requests: how many the manager served at once.
        ideal_requests: how many of the same sequence fit with exact bytes in 16-token blocks.
        mean_requests: of a mix, requests of its mean size by the pages that each length holds: vLLM's way to count.
        vllm_usable: vLLM's usable.
        vllm_requests: vLLM's requests at once.
        missed: the marks that are missed.
    """

    family: str
    load: str
    usable: float
    requests: int
    ideal_requests: int
    mean_requests: int
    vllm_usable: float | None = None
    vllm_requests: int | None = None
    missed: list[str] = field(default_factory=list)


def loads(max_model_len: int) -> dict[str, tuple[int, ...]]:
    """Return load name -> lengths of its requests in tokens, to be repeated; none longer than `max_model_len`."""
    rng = random.Random(0)
    uniform = tuple(rng.randint(32, 2048) for _ in range(200))
    log_uniform = tuple(int(math.exp(rng.uniform(math.log(64), math.log(16_384)))) for _ in range(100))
    found = {str(length): (length,) for length in LENGTHS}
    found |= {name: interleave(parts) for name, parts in MIXES.items()}
    found |= {"U[32,2048]": uniform, "logU[64,16384]": log_uniform}
    return {name: lengths for name, lengths in found.items() if max(lengths) <= max_model_len}


def interleave(parts: dict[int, int]) -> tuple[int, ...]:
    """Return each length as often as its parts say, spread so that every beginning has about the same shares."""
    places = [((2 * i + 1) / (2 * count), length) for length, count in parts.items() for i in range(count)]
    return tuple(length for _, length in sorted(places))


def vllm_figures() -> dict[tuple[str, str], tuple[float | None, int]]:
    """Return (family key, load) -> (usable or None, requests at once) of vLLM 0.32.0 in 40 GiB."""
    with VLLM_FILE.open() as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return {
            (row["family"], row["load"]): (float(row["usable"]) if row["usable"] else None, int(row["requests"]))
            for row in rows
        }


def measure(
    family: Family, config: KVCacheConfig, pages: PagesOfLength, load: str, lengths: Sequence[int], pool_bytes: int
) -> Row:
    """Fill the pool with one load and count."""
    driver, held_lengths = fill(family, config, lengths)
    return Row(
        family=family.key,
        load=load,
        usable=usable(family, driver, held_lengths),
        requests=len(held_lengths),
        ideal_requests=ideal_requests(family, pool_bytes, lengths),
        mean_requests=mean_requests(config, pages.mean(lengths)),
    )


def judge(row: Row) -> None:
    """Write down which marks a row in 40 GiB misses, after looking up vLLM's figures."""
    row.vllm_usable, row.vllm_requests = vllm_figures()[row.family, row.load]
    if row.load.isdigit():
        mark = USABLE_MARK if int(row.load) >= SHORT_TOKENS else USABLE_MARK_SHORT
        if row.usable < mark:
            row.missed.append(f"usable < {mark}")
        row.mean_requests = row.requests  # all of one length: the same
    if row.requests < int(IDEAL_SHARE * row.ideal_requests):
        row.missed.append(f"requests < {int(IDEAL_SHARE * row.ideal_requests)}")
    if row.mean_requests < row.vllm_requests:
        row.missed.append("requests < vLLM's")


def _plan(family: Family, pool_bytes: int, max_model_len: int) -> KVCacheConfig:
    limits = {"max_model_len": max_model_len, "num_lookahead_tokens": family.num_lookahead_tokens}
    return plan_pool(family.specs(), pool_bytes, **limits)


def run_fill(families: Sequence[Family], quick: bool, as_json: bool) -> list[Row]:
    """Fill every family under every load, printing as it goes."""
    rows = []
    if not as_json:
        print(f"{'family':30} {'load':>14} {'usable':>7} {'requests':>8} {'ideal':>6} {'share':>6} {'by mean':>7}"
              f" | vLLM: {'usable':>6} {'requests':>8} | {'s':>5}")  # fmt: skip
    for family in families:
        pool_bytes = QUICK_POOL_BYTES if quick else POOL_BYTES
        max_model_len = min(family.max_model_len, QUICK_MAX_MODEL_LEN) if quick else family.max_model_len
        config = _plan(family, pool_bytes, max_model_len)
        chosen = {name: kept for name, kept in loads(max_model_len).items() if not quick or name in QUICK_LOADS}
        pages = PagesOfLength(config, max(max(lengths) for lengths in chosen.values()))
        for load, lengths in chosen.items():
            start = time.perf_counter()
            row = measure(family, config, pages, load, lengths, pool_bytes)
            if not quick:
                judge(row)
            rows.append(row)
            if not as_json:
                print(format_row(family, row, time.perf_counter() - start), flush=True)
    return rows


def format_row(family: Family, row: Row, seconds: float) -> str:
    """Return one line of the table."""
    vllm_usable = "-" if row.vllm_usable is None else f"{row.vllm_usable:.3f}"
    vllm_requests = "-" if row.vllm_requests is None else str(row.vllm_requests)
    verdict = "SHORT: " + ", ".join(row.missed) if row.missed else ""
    return (
        f"{family.name:30} {row.load:>14} {row.usable:7.3f} {row.requests:8} {row.ideal_requests:6}"
        f" {row.requests / max(1, row.ideal_requests):6.3f} {row.mean_requests:7} | "
        f"{vllm_usable:>12} {vllm_requests:>8} | {seconds:5.1f} {verdict}"
    )


def run_churn(families: Sequence[Family], quick: bool, num_steps: int | None, as_json: bool) -> list[dict[str, object]]:
    """Let requests come and go in every family, at every scale of the conversations' lengths."""
    found = []
    for family in families:
        pool_bytes = QUICK_POOL_BYTES if quick else POOL_BYTES
        max_model_len = min(family.max_model_len, QUICK_MAX_MODEL_LEN) if quick else family.max_model_len
        config = _plan(family, pool_bytes, max_model_len)
        for scale in QUICK_SCALES if quick else SCALES:
            start = time.perf_counter()
            result = Churn(family, config, scale).run(num_steps or (100 if quick else min(600 * scale, 2400)))
            missed = result.min_usable < CHURN_MARK
            found.append({"family": family.key, "scale": scale, "short": missed, **asdict(result)})
            if not as_json:
                print(format_churn(family, scale, result, time.perf_counter() - start, missed), flush=True)
    return found


def format_churn(family: Family, scale: int, result: ChurnResult, seconds: float, missed: bool) -> str:
    """Return one line of the churn table."""
    return (
        f"{family.name:30} x{scale:<3} usable min {result.min_usable:.3f} mean {result.mean_usable:.3f}, of the pool "
        f"{result.mean_occupancy:.3f}; {result.steps} steps, {result.mean_running:.0f} running, {result.finished} "
        f"finished, {result.preempted} preempted, {result.moved_bytes_per_step / 1e6:.2f} MB moved a step; "
        f"{seconds:.1f} s{'  SHORT' if missed else ''}"
    )


def main() -> int:
    """Run what the command line asks for; return 1 if a mark is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", default=[], help="keys such as 2a 8b; all without")
    parser.add_argument("--churn", action="store_true", help="arrivals and departures instead of one filling")
    parser.add_argument("--steps", type=int, help="steps of churn")
    parser.add_argument("--quick", action="store_true", help="4 GiB, short requests, no marks for filling")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    families = choose(args.family)
    if args.churn:
        churned = run_churn(families, args.quick, args.steps, args.json)
        missed, found = [entry for entry in churned if entry["short"]], churned
    else:
        rows = run_fill(families, args.quick, args.json)
        found = [asdict(row) for row in rows]
        missed = [entry for entry in found if entry["missed"]]
    if args.json:
        print(json.dumps(found))
    else:
        print(f"{len(found) - len(missed)} of {len(found)} rows reach their marks")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
