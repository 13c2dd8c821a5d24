"""llama.cpp, through xllamacpp, as a process that `peers.py` times. Its own Python runs this."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from peer_loop import Generate, serve


def make(work: dict[str, Any]) -> Generate:
    """Load the GGUF file, with a slot for each request."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = work["gguf"]
    params.n_parallel = work["requests"]
    params.n_ctx = work["requests"] * (work["input"] + work["output"] + 16)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = work["threads"]
    server = xllamacpp.Server(params)

    def complete(prompt: list[int], num_output_tokens: int) -> int:
        asked = {"prompt": prompt, "max_tokens": num_output_tokens, "temperature": 0, "ignore_eos": True}
        answer = server.handle_completions({**asked, "cache_prompt": False})
        if isinstance(answer, (str, bytes)):
            answer = json.loads(answer)
        return answer["usage"]["completion_tokens"]

    def generate(prompts: list[list[int]], num_output_tokens: int) -> Sequence[int]:
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(complete, prompts, [num_output_tokens] * len(prompts)))

    return generate


if __name__ == "__main__":
    serve(make)
