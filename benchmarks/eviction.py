"""Hit tokens of this engine's eviction, of plain LRU, and of models of Jenga's and Marconi's, on the same requests.

    python benchmarks/eviction.py            two kinds of traffic, a hybrid and a windowed model, three sizes of pool
    python benchmarks/eviction.py --quick    fewer requests; --json for programs

This engine's figure comes from the real manager: one request at a time, from admission to its end, in a pool of
slabs. The others are compact models in a memory without fragmentation (`eviction_policies.py`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import numpy as np
from control_plane import make_adapter
from eviction_policies import CacheShape, Marconi, PageCache
from eviction_traces import BLOCK_TOKENS, TRACES, TracedRequest
from families import FAMILIES, GEMMA_3_12B, Layer

from girih.units import GIB

CHUNK_TOKENS = 8192
MODELS: dict[str, tuple[Layer, ...]] = {
    "Qwen3-Next-80B": next(family.layers for family in FAMILIES if family.key == "5"),
    "Gemma-3-12B": GEMMA_3_12B,
}
FLOPS: dict[str, tuple[float, float]] = {  # per token; per token and token before it, in full attention
    "Qwen3-Next-80B": (2 * 3e9, 12 * 4 * 16 * 256),
    "Gemma-3-12B": (2 * 12e9, 8 * 4 * 16 * 256),
}
POOLS_GIB: dict[str, Sequence[int]] = {"Qwen3-Next-80B": (4, 8, 16), "Gemma-3-12B": (8, 16, 32)}
ALPHAS = (0.0, 0.1, 0.5, 2.0)
"""Marconi tunes alpha on past requests; here the best of these counts, chosen afterwards."""


def shape_of(name: str) -> CacheShape:
    """Return the bytes of a model's two groups."""
    layers = MODELS[name]
    full = sum(layer.token_bytes for layer in layers if layer.window is None)
    windowed = [layer for layer in layers if layer.window is not None]
    states = sum(layer.state_bytes for layer in layers)
    extra = sum(layer.token_bytes for layer in windowed) * BLOCK_TOKENS + states
    window = windowed[0].window if windowed else None
    blocks = -(-(window - 1) // BLOCK_TOKENS) if window else None
    return CacheShape(full * BLOCK_TOKENS, extra, blocks, *FLOPS[name])


def manager_hits(name: str, pool_bytes: int, requests: Sequence[TracedRequest]) -> int:
    """Return the hit tokens of the real manager, one request at a time."""
    longest = max(len(request.token_ids) for request in requests)
    specs = {f"layer.{i}": layer.spec for i, layer in enumerate(MODELS[name])}
    cache = make_adapter(specs, pool_bytes, max_model_len=longest + 1, max_num_seqs=1)
    rid = np.zeros(1, dtype=np.int64)
    hit_tokens = 0
    for request in requests:
        hit_tokens += cache.admit(0, request.token_ids[: request.num_prompt]) // BLOCK_TOKENS * BLOCK_TOKENS
        for _ in range(0, request.num_prompt, CHUNK_TOKENS):
            cache.tick()
            cache.prefill(0, CHUNK_TOKENS)
        for position in range(request.num_prompt, len(request.token_ids)):
            cache.tick()
            done = cache.step_batch(rid, request.token_ids[position : position + 1])
            assert done.all(), "a lone request has no room"
        cache.free(0)
    cache.check()
    return hit_tokens


def compare(name: str, pool_bytes: int, requests: Sequence[TracedRequest]) -> dict[str, int]:
    """Return policy -> hit tokens for one model, pool and traffic."""
    shape = shape_of(name)
    found = {
        "girih": manager_hits(name, pool_bytes, requests),
        "LRU": _hits(PageCache(shape, pool_bytes, balanced=False), requests),
        "Jenga": _hits(PageCache(shape, pool_bytes, balanced=True), requests),
    }
    found["Marconi"] = max(_hits(Marconi(shape, pool_bytes, alpha), requests) for alpha in ALPHAS)
    return found


def _hits(cache: PageCache | Marconi, requests: Sequence[TracedRequest]) -> int:
    return sum(cache.run(request) for request in requests)


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--quick", action="store_true", help="150 requests and one pool each")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = []
    for trace, make in TRACES.items():
        requests = list(make(150 if args.quick else args.requests))
        num_prompt = sum(request.num_prompt for request in requests)
        for name, pools in POOLS_GIB.items():
            for pool_gib in pools[:1] if args.quick else pools:
                hits = compare(name, pool_gib * GIB, requests)
                results.append(
                    {"trace": trace, "model": name, "pool_gib": pool_gib, "prompt_tokens": num_prompt, **hits}
                )
                if not args.json:
                    shares = "  ".join(f"{policy} {count / num_prompt:.3f}" for policy, count in hits.items())
                    print(f"{trace:9} {name:15} {pool_gib:3} GiB  share of prompt tokens hit: {shares}", flush=True)
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
