"""Output tokens per second of Girih and of transformers on the same work, in alternation in one process.

    python benchmarks/generate.py --model smollm2 --requests 16 --input 128 --output 64 --rounds 3

Greedy, float32, random prompts, prefill included. Prints each round and the median ratio with its spread; `--json`
for programs. It needs the `test` extra, which brings transformers.
"""

import argparse
import json
import random
import statistics
import time

import torch

try:
    from transformers import AutoModelForCausalLM
except ImportError:
    raise SystemExit("this compares with transformers: pip install -c constraints.txt -e '.[test]'") from None

from girih import LLM, SamplingParams
from girih.checkpoint.resolve import resolve_model


def girih_seconds(llm: LLM, prompts: list[list[int]], num_output_tokens: int) -> float:
    """Time one batch of greedy generation with Girih, in seconds."""
    params = SamplingParams(temperature=0, max_tokens=num_output_tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    assert all(len(output.outputs[0].token_ids) == num_output_tokens for output in outputs)
    return seconds


@torch.inference_mode()
def transformers_seconds(model: torch.nn.Module, prompts: list[list[int]], num_output_tokens: int) -> float:
    """Time the same batch with transformers' generate, in seconds."""
    start = time.perf_counter()
    ids = torch.tensor(prompts)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_output_tokens,
        min_new_tokens=num_output_tokens,
        do_sample=False,
    )
    return time.perf_counter() - start


def main() -> None:
    """Run the alternation and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a pulled name or a Hugging Face directory")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--input", type=int, default=128, help="prompt tokens per request")
    parser.add_argument("--output", type=int, default=64, help="output tokens per request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    directory = resolve_model(args.model)
    rng = random.Random(0)
    prompts = [[rng.randint(100, 40000) for _ in range(args.input)] for _ in range(args.requests)]
    peer = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    num_tokens = args.requests * args.output
    rounds = []
    options = {"dtype": "float32", "enable_prefix_caching": False, "kv_cache_memory": 1 << 30}
    with LLM(args.model, max_model_len=args.input + args.output, **options) as llm:
        girih_seconds(llm, prompts[:1], 4)
        transformers_seconds(peer, prompts[:1], 4)
        for _ in range(args.rounds):
            ours = num_tokens / girih_seconds(llm, prompts, args.output)
            theirs = num_tokens / transformers_seconds(peer, prompts, args.output)
            rounds.append({"girih": ours, "transformers": theirs, "ratio": ours / theirs})
            if not args.json:
                print(f"girih {ours:7.1f} tokens/s   transformers {theirs:7.1f} tokens/s   ratio {ours / theirs:.2f}")
    ratios = sorted(entry["ratio"] for entry in rounds)
    summary = {"median_ratio": statistics.median(ratios), "min_ratio": ratios[0], "max_ratio": ratios[-1]}
    if args.json:
        print(json.dumps({"work": vars(args), "rounds": rounds, **summary}))
    else:
        print(f"median ratio {summary['median_ratio']:.2f} (from {ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
