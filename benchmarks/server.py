"""What the HTTP server costs, and how evenly tokens come: streams of a real server beside the same work offline.

    python benchmarks/server.py                          SmolLM2, 64 streams of 128 + 64 tokens, three alternations
    python benchmarks/server.py --long-prompts           also: a prompt of 2,000 tokens arrives every second

Offline and server take turns, each in a process of its own, with the same options and the same prompts. The ratio is
of output tokens per second, prompts included, from the first request sent to the last answer. Gaps are between the
events of a stream, once all streams have their first token. The client is a process of its own on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

HOST = "127.0.0.1"
WORDS = ("the", "old", "lighthouse", "keeper", "counted", "seven", "grey", "ships", "while", "rain", "fell", "quietly")
LONG_PROMPT_TOKENS = 2000


@dataclass
class Stream:
    """What one streamed answer brought.

    Args:
        times_s: when each event with text came.
        num_tokens: of output, as the server counts them.
    """

    times_s: list[float] = field(default_factory=list)
    num_tokens: int = 0


def prompts(number: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Return prompts of so many token ids, which differ from the first token on."""
    from girih.checkpoint.resolve import resolve_model
    from girih.checkpoint.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_directory(resolve_model("smollm2"))
    made = []
    for i in range(number):
        words = [WORDS[(seed + i * 7 + j * (3 + i % 5)) % len(WORDS)] for j in range(num_tokens)]
        made.append(tokenizer.encode(f"Story {seed + i}: " + " ".join(words))[:num_tokens])
    return made


async def stream(port: int, prompt: list[int], num_output: int) -> Stream:
    """Send one request over a connection of its own and read its events."""
    body = {
        "prompt": prompt, "max_tokens": num_output, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(HOST, port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    result = Stream()
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"the server said {status!r}: {await reader.read()!r}")
    async for line in reader:
        if line.startswith(b'data: {"id"'):
            if b'"choices":[]' in line:
                result.num_tokens = json.loads(line[6:])["usage"]["completion_tokens"]
            else:
                result.times_s.append(time.perf_counter())
    writer.close()
    return result


async def run_streams(port: int, work: list[list[int]], num_output: int, long: list[list[int]]) -> dict[str, Any]:
    """Send all prompts at once, and a long one every second; return rate and gaps."""
    start_s = time.perf_counter()
    tasks = [asyncio.create_task(stream(port, prompt, num_output)) for prompt in work]
    others = []
    pending = set(tasks)
    for prompt in long:
        _, pending = await asyncio.wait(pending, timeout=1.0)
        if not pending:
            break
        others.append(asyncio.create_task(stream(port, prompt, 1)))
    streams = await asyncio.gather(*tasks)
    elapsed_s = time.perf_counter() - start_s
    await asyncio.gather(*others)
    begun_s = max(result.times_s[0] for result in streams)
    gaps = sorted(
        later - earlier
        for result in streams
        for earlier, later in zip(result.times_s, result.times_s[1:], strict=False)
        if earlier >= begun_s
    )
    return {
        "tokens_per_s": sum(result.num_tokens for result in streams) / elapsed_s,
        "gap_median_s": statistics.median(gaps),
        "gap_p99_s": gaps[int(0.99 * len(gaps))],
        "gap_max_s": gaps[-1],
        "long_prompts": len(others),
    }


@contextlib.contextmanager
def server(args: argparse.Namespace, *options: str) -> Iterator[int]:
    """Run a server; yields its port."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "girih.cli.main",
        "serve",
        args.model,
        "--port",
        str(port),
        *engine(args),
        *options,
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1):
                break
            if process.poll() is not None:
                raise SystemExit(f"the server ended with exit code {process.returncode}: {' '.join(command)}")
            time.sleep(0.1)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def engine(args: argparse.Namespace) -> list[str]:
    """Return the engine's options, the same for both."""
    return ["--kv-cache-memory", args.kv_cache, *(["--quantization", "int8"] if args.int8 else [])]


def client(args: argparse.Namespace, port: int, seed: int, num_long: int) -> dict[str, Any]:
    """Run the client in a process of its own; returns what it found."""
    command = [sys.executable, __file__, "--client", str(port), "--seed", str(seed), "--num-long", str(num_long)]
    for name in ("streams", "input", "output"):
        command += [f"--{name}", str(getattr(args, name))]
    answer: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return answer


def offline(args: argparse.Namespace) -> None:
    """Serve rounds of the offline engine: a seed on each line of standard input, a rate for it on standard output."""
    from girih import LLM, SamplingParams

    options: dict[str, Any] = {"quantization": "int8"} if args.int8 else {}
    params = SamplingParams(temperature=0, max_tokens=args.output, ignore_eos=True)
    with LLM(args.model, kv_cache_memory=args.kv_cache, **options) as llm:
        print("ready", flush=True)
        for line in sys.stdin:
            work = prompts(args.streams, args.input, int(line))
            start_s = time.perf_counter()
            outputs = llm.generate(work, params)
            num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            print(num_tokens / (time.perf_counter() - start_s), flush=True)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Let server and offline engine take turns."""
    command = [sys.executable, __file__, "--offline", "--model", args.model, "--kv-cache", args.kv_cache]
    for name in ("streams", "input", "output"):
        command += [f"--{name}", str(getattr(args, name))]
    command += ["--int8"] if args.int8 else []
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdin is not None
    assert other.stdout is not None
    rounds = []
    with server(args) as port:
        other.stdout.readline()
        for round_ in range(args.alternations + 1):
            seed = 1000 * round_  # other prompts each time: what is cached of one round helps no other
            print(seed, file=other.stdin, flush=True)
            rate = float(other.stdout.readline())
            rounds.append({"offline_tokens_per_s": rate, **client(args, port, seed, 0)})
            _say(f"round {round_}: offline {rate:.1f}, server {rounds[-1]['tokens_per_s']:.1f} tokens/s")
    other.stdin.close()
    other.wait()
    counted = rounds[1:]  # the first one warms both up
    return {
        "rounds": counted,
        "ratio": statistics.median(r["tokens_per_s"] / r["offline_tokens_per_s"] for r in counted),
        "p99_of_median": statistics.median(r["gap_p99_s"] / r["gap_median_s"] for r in counted),
    }


def with_long_prompts(args: argparse.Namespace) -> dict[str, Any]:
    """Measure gaps while a long prompt arrives every second and a step computes at most 256 tokens."""
    with server(args, "--max-num-batched-tokens", "256") as port:
        client(args, port, 1, 1)
        found = client(args, port, 2, 100)
    return {**found, "max_of_median": found["gap_max_s"] / found["gap_median_s"]}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Parse the command line and print figures, or take the part of a client or of the offline engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--alternations", type=int, default=3)
    parser.add_argument("--kv-cache", default="1GiB")
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--long-prompts", action="store_true")
    parser.add_argument("--json", action="store_true")
    for name in ("--client", "--seed", "--num-long"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.offline:
        offline(args)
    elif args.client is not None:
        work = prompts(args.streams, args.input, args.seed)
        long = prompts(args.num_long, LONG_PROMPT_TOKENS, args.seed + 500)
        print(json.dumps(asyncio.run(run_streams(args.client, work, args.output, long))))
    else:
        figures = {"streams": compare(args)}
        if args.long_prompts:
            figures["long prompts"] = with_long_prompts(args)
        print(json.dumps(figures, indent=2) if args.json else _text(figures))


def _text(figures: dict[str, Any]) -> str:
    streams = figures["streams"]
    lines = [
        f"server / offline throughput: {streams['ratio']:.3f}",
        f"gaps of a stream, p99 / median: {streams['p99_of_median']:.2f}",
    ]
    if "long prompts" in figures:
        found = figures["long prompts"]
        lines.append(
            f"with {found['long_prompts']} long prompts: median gap {found['gap_median_s'] * 1e3:.1f} ms, "
            f"largest / median {found['max_of_median']:.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    main()
