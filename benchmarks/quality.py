"""Perplexity, and agreement with float32 on the most likely token, of each form of weights and cache, on one text.

    python benchmarks/quality.py --text moby-dick.txt                  SmolLM2: int8 weights, bfloat16, int8 cache
    python benchmarks/quality.py --text moby-dick.txt --model gemma3-270m --tokens 20480 --json

The text is cut into windows; each position but the first of a window is predicted from those before it. Any text will
do; docs/performance.md names the one of its table, a novel in the public domain, and where to get it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from girih import LLM, SamplingParams

FLOAT32 = {"dtype": "float32"}
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": FLOAT32,
    "int8": FLOAT32 | {"quantization": "int8"},
    "bfloat16": {"dtype": "bfloat16"},
    "float32, int8 cache": FLOAT32 | {"kv_cache_dtype": "int8"},
    "int8, int8 cache": FLOAT32 | {"quantization": "int8", "kv_cache_dtype": "int8"},
}


def read(variant: str, args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Run the text through an engine: the log probability of each predicted token, and the most likely one there."""
    with LLM(args.model, max_model_len=args.window + 1, kv_cache_memory="256MiB", **VARIANTS[variant]) as llm:
        token_ids = llm.tokenizer.encode(Path(args.text).read_text())[: args.tokens]
        windows = [token_ids[start : start + args.window] for start in range(0, len(token_ids), args.window)]
        windows = [window for window in windows if len(window) > 1]
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)
        logprobs, best = [], []
        for output in llm.generate(windows, params):
            for token_id, entries in list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[1:]:
                logprobs.append(entries[token_id].logprob)
                best.append(next(other for other, entry in entries.items() if entry.rank == 1))
    return np.array(logprobs), np.array(best)


def main() -> None:
    """Compare all variants with the first one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="a file of plain text")
    parser.add_argument("--model", default="smollm2", help="a pulled name or a Hugging Face directory")
    parser.add_argument("--tokens", type=int, default=20480, help="of the text, from its beginning")
    parser.add_argument("--window", type=int, default=512, help="tokens of each window")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    names = ["float32", *(name for name in args.variants if name != "float32")]
    rows = []
    for name in names:
        print(f"{name} ...", file=sys.stderr)
        logprobs, best = read(name, args)
        if name == "float32":
            truth = best
        perplexity = math.exp(-float(logprobs.mean()))
        rows.append({"variant": name, "perplexity": perplexity, "top_1_agreement": float((best == truth).mean())})
    result = {"model": args.model, "predicted_tokens": len(truth), "window": args.window, "rows": rows}
    if args.json:
        print(json.dumps(result, indent=1))
        return
    print(f"{args.model}, {len(truth)} predicted tokens in windows of {args.window}")
    for row in rows:
        more = row["perplexity"] / rows[0]["perplexity"] - 1
        agreement = row["top_1_agreement"]
        print(f"{row['variant']:20} perplexity {row['perplexity']:7.2f} ({more:+.2%}), same token {agreement:.2%}")


if __name__ == "__main__":
    main()
