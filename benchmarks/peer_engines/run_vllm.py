"""vLLM on a CPU, as a process that `peers.py` times. Its own Python runs this."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from peer_loop import Generate, serve


def make(work: dict[str, Any]) -> Generate:
    """Start the engine with the options of the work."""
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": str(work["kv_cache_gib"]),
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM, SamplingParams

    length = work["input"] + work["output"] + 8
    common = {"max_model_len": length, "max_num_seqs": work["requests"]}
    common["enable_prefix_caching"] = work["shared"] > 0
    llm = LLM(model=work["model"], **common, **work["options"])

    def generate(prompts: list[list[int]], num_output_tokens: int) -> Sequence[int]:
        params = SamplingParams(temperature=0, max_tokens=num_output_tokens, ignore_eos=True)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [len(output.outputs[0].token_ids) for output in llm.generate(asked, params, use_tqdm=False)]

    return generate


if __name__ == "__main__":
    serve(make)
