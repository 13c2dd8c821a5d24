"""The real models as they are stored, in bfloat16, through the whole engine, against float32 of transformers."""

import pytest
import torch
from oracle import oracle_of
from prompts import prompt_ids

from girih import LLM, SamplingParams

pytestmark = pytest.mark.real_weights

LENGTH = 100
AGREEMENT = 0.9
"""Least share of positions at which both find the same token most likely; bfloat16 has 8 bits of precision."""
GAP = 0.5
"""Most that a greedy token may be below the best, in the logits of float32."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ("smollm2", "gemma3-270m")]
)
def test_bfloat16_finds_the_tokens_of_float32(real_model, name):
    directory = real_model(name)
    with LLM(str(directory), dtype="bfloat16", max_model_len=256, kv_cache_memory="64MiB") as llm:
        prompt = prompt_ids(llm.tokenizer.encode, "english", LENGTH)
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=1)
        (output,) = llm.generate([prompt], params)
    token_ids = output.outputs[0].token_ids
    logits = oracle_of(directory).logits([], [*prompt, *token_ids, 0])[:-1]
    best = [next(i for i, entry in entries.items() if entry.rank == 1) for entries in output.prompt_logprobs[1:]]
    same = torch.tensor(best) == logits[: LENGTH - 1].argmax(dim=1)
    assert float(same.float().mean()) >= AGREEMENT
    chosen = logits[LENGTH - 1 :]
    gaps = chosen.max(dim=1).values - chosen.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    assert float(gaps.max()) < GAP
