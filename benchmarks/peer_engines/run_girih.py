"""Girih, as a process that `peers.py` times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peer_loop import Generate, serve


def make(work: dict[str, Any]) -> Generate:
    """Start the engine with the options of the work."""
    from girih import LLM, SamplingParams

    length = work["input"] + work["output"]
    common = {"max_model_len": length, "kv_cache_memory": f"{work['kv_cache_gib']}GiB"}
    common["enable_prefix_caching"] = work["shared"] > 0
    llm = LLM(work["model"], **common, **work["options"])

    def generate(prompts: list[list[int]], num_output_tokens: int) -> Sequence[int]:
        params = SamplingParams(temperature=0, max_tokens=num_output_tokens, ignore_eos=True)
        return [len(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]

    return generate


if __name__ == "__main__":
    serve(make)
