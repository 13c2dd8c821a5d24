"""`quantization="int8"` through the whole engine."""

import pytest
import torch
from oracle import oracle_of
from prompts import prompt_ids
from tiny_models import tiny_gemma3, tiny_llama

from girih import LLM, SamplingParams
from girih.arch import CacheDtypes, stage_parts
from girih.checkpoint.hf_config import load_config

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
PROMPTS = [list(range(3, 3 + length)) for length in (1, 5, 33, 40, 70)]


def outputs(directory, prompts, **options):
    with LLM(str(directory), quantization="int8", kv_cache_memory="4MiB", max_model_len=128, **options) as llm:
        return [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in llm.generate(prompts, PARAMS)]


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma3])
def test_a_request_gets_the_same_bits_alone_in_a_batch_and_in_chunks(make, tmp_path):
    directory = make(tmp_path)
    together = outputs(directory, PROMPTS)
    assert together == outputs(directory, PROMPTS, max_num_batched_tokens=16)
    assert together == [outputs(directory, [prompt])[0] for prompt in PROMPTS]


def test_the_bytes_that_are_planned_are_those_of_the_loaded_weights(tmp_path):
    directory = tiny_llama(tmp_path, hidden_size=64, intermediate_size=128, head_dim=16)
    (part,) = stage_parts(load_config(directory), CacheDtypes("float32"), num_stages=1, pipeline_split=None)
    with LLM(str(directory), quantization="int8", kv_cache_memory="4MiB") as llm:
        (loaded,) = llm.core.executor.collective_rpc("load_model")
        assert loaded == part.weight_bytes(4, quantization="int8")


@pytest.mark.real_weights
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ("smollm2", "gemma3-270m")]
)
def test_int8_finds_the_tokens_of_float32(real_model, name):
    directory = real_model(name)
    with LLM(str(directory), quantization="int8", dtype="float32", max_model_len=256, kv_cache_memory="64MiB") as llm:
        prompt = prompt_ids(llm.tokenizer.encode, "english", 100)
        (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=1))
    logits = oracle_of(directory).logits([], prompt)
    best = [next(i for i, entry in entries.items() if entry.rank == 1) for entries in output.prompt_logprobs[1:]]
    same = torch.tensor(best) == logits.argmax(dim=1)
    assert float(same.float().mean()) >= 0.85
