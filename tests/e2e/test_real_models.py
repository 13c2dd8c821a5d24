"""SmolLM2 and Gemma 3 against transformers on the same directory: greedy tokens and logits, in every way to run."""

import dataclasses
import json
import random
import subprocess
import sys
from contextlib import suppress

import numpy as np
import pytest
from core_driver import run
from oracle import NEAR_TIE, Oracle, check_outputs, oracle_of, recorded_logits
from prompts import TEXTS, prompt_ids

from girih import LLM, SamplingParams, arch
from girih.checkpoint.hf_config import load_config
from girih.config import EngineConfig
from girih.engine.core import EngineCore
from girih.errors import CapacityError
from girih.kv import get_kv_cache_configs
from girih.kv.capacity import peak_pages, slabs_needed

pytestmark = pytest.mark.real_weights

MODELS = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ("smollm2", "gemma3-270m")]
OPTIONS = {"dtype": "float32", "max_model_len": 2600, "kv_cache_memory": "512MiB", "check_invariants": True}
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=3, ignore_eos=True)


def in_soak(*values):
    """Mark a case that differs from others only in its numbers."""
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.fixture(scope="module", params=MODELS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def directory(name, real_model):
    return real_model(name)


@pytest.fixture(scope="module")
def oracle(directory) -> Oracle:
    return oracle_of(directory)


@pytest.fixture(scope="module")
def llm(directory):
    with LLM(str(directory), **OPTIONS) as llm:
        yield llm


def mixed_prompts(llm: LLM) -> list[list[int]]:
    """Prompts around the block size and over the window of 512, in three languages."""
    encode = llm.tokenizer.encode
    lengths = {"english": (1, 16, 530), "code": (15,), "japanese": (17,)}
    return [prompt_ids(encode, language, n) for language, numbers in lengths.items() for n in numbers]


@pytest.mark.parametrize(
    ("language", "length"), [("english", 1), ("code", 100), ("japanese", 520), in_soak("english", 2400)]
)
def test_alone_tokens_and_logits_equal_transformers(llm, oracle, language, length) -> None:
    prompt = prompt_ids(llm.tokenizer.encode, language, length)
    with recorded_logits(llm.core) as recorded:
        (output,) = llm.generate([prompt], GREEDY)
    expected = oracle.check_greedy(prompt, output.outputs[0].token_ids)
    np.testing.assert_allclose(recorded(), expected.numpy(), atol=1e-3, rtol=0)


def test_batched_and_after_a_prefix_hit_tokens_and_logprobs_equal_transformers(llm, oracle) -> None:
    prompts = mixed_prompts(llm)
    assert llm.core.reset_prefix_cache()
    first = llm.generate(prompts, GREEDY)
    again = llm.generate(prompts, GREEDY)
    assert all(output.num_cached_tokens > 0 for output in again if len(output.prompt_token_ids) > 16)
    check_outputs(oracle, first + again)


def test_three_completions_of_a_prompt_equal_transformers(llm, oracle) -> None:
    prompt = prompt_ids(llm.tokenizer.encode, "english", 40)
    params = SamplingParams(temperature=0, n=3, max_tokens=8, logprobs=1)
    (output,) = llm.generate([prompt], params)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    check_outputs(oracle, [output])


@pytest.mark.parametrize(("chunk", "length"), [in_soak(1, 20), (7, 61), in_soak(16, 130), (17, 540)])
def test_chunked_prefill_equals_transformers(llm, directory, oracle, chunk, length) -> None:
    prompt = prompt_ids(llm.tokenizer.encode, "code", length)
    options = {"dtype": "float32", "max_model_len": 700, "kv_cache_memory_bytes": 512 << 20, "check_invariants": True}
    core = EngineCore(EngineConfig(model=str(directory), max_num_batched_tokens=chunk, **options))
    try:
        with recorded_logits(core) as recorded:
            request_id = core.add_request(prompt, dataclasses.replace(GREEDY, seed=0))
            tokens, _, _ = run(core)[request_id]
        assert core.stats().num_steps >= length // chunk
        expected = oracle.check_greedy(prompt, tokens)
        np.testing.assert_allclose(recorded(), expected.numpy(), atol=1e-3, rtol=0)
    finally:
        core.shutdown()


@pytest.mark.soak
def test_preempted_requests_equal_transformers(directory, oracle) -> None:
    options = {**OPTIONS, "max_model_len": 104, "kv_cache_memory": pool_bytes_for(directory, 1.8, num_tokens=104)}
    with LLM(str(directory), **options) as llm:
        prompts = [prompt_ids(llm.tokenizer.encode, "english", 60, start=80 * i) for i in range(4)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=44, ignore_eos=True, logprobs=1))
        assert llm.stats().num_preemptions > 0
    check_outputs(oracle, outputs)


def test_requests_that_are_moved_and_preempted_at_random_equal_transformers(directory, oracle) -> None:
    options = {**OPTIONS, "max_model_len": 640, "kv_cache_memory": pool_bytes_for(directory, 3.5, num_tokens=640)}
    chance = random.Random(3)
    with LLM(str(directory), **options) as llm:
        encode, queues, manager = llm.tokenizer.encode, llm.core.scheduler.queues, llm.core.scheduler.manager
        (config,) = llm.kv_cache_configs
        least = slabs_needed(peak_pages(config.groups, 640), config.groups)
        step = llm.core.step

        def disturbed_step():
            if chance.random() < 0.3:  # pages move out of the slabs that go, and into those that come back
                with suppress(CapacityError):
                    manager.resize(chance.randint(least, config.num_slabs))
            if len(queues.running) > 1 and chance.random() < 0.1:
                queues.preempt(chance.choice(queues.running))
            return step()

        llm.core.step = disturbed_step
        shared = prompt_ids(encode, "english", 560)
        prompts = [prompt_ids(encode, "code", 30 * i + 5, start=40 * i) for i in range(1, 5)]
        prompts += [shared + prompt_ids(encode, "code", 9 + i, start=90 * i) for i in range(3)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1))
        stats = llm.stats()
        assert stats.num_preemptions > 0
        assert stats.cache.pages_moved > 0
        assert stats.cache.tokens_hit > 0
    check_outputs(oracle, outputs)


@pytest.mark.soak
def test_64_mixed_requests_in_a_pool_that_holds_a_quarter_of_them(directory) -> None:
    rng, options = random.Random(0), {**OPTIONS, "max_model_len": 700}
    options["kv_cache_memory"] = pool_bytes_for(
        directory, 64 / 4 * 0.25, num_tokens=700
    )  # a quarter is as long on average
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(str(directory), **options) as llm:
        lengths = [int(2 ** rng.uniform(2, 9.4)) for _ in range(64)]
        starts = [rng.randrange(1200) for _ in lengths]
        languages = [rng.choice(list(TEXTS)) for _ in lengths]
        prompts = [prompt_ids(llm.tokenizer.encode, *item) for item in zip(languages, lengths, starts, strict=True)]
        together = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        assert llm.stats().num_preemptions > 0
        alone = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    assert together == alone


def pool_bytes_for(directory, num_requests: float, num_tokens: int) -> int:
    """Return the memory that holds about so many requests of `num_tokens` tokens each."""
    model_config = load_config(directory)
    specs = arch.load(model_config).kv_cache_specs(model_config, arch.CacheDtypes("float32"))
    (config,) = get_kv_cache_configs([specs], [1 << 30], max_model_len=num_tokens)
    pages = zip(peak_pages(config.groups, num_tokens), config.groups, strict=True)
    return int(num_requests * sum(n * group.page_stride_bytes for n, group in pages)) + config.null_page_bytes


def run_generate(directory, num_tokens: int, *prompts: str) -> list[tuple[list[int], list[int]]]:
    """Run the command as a user would; returns each prompt's token ids with those of its completion."""
    command = [sys.executable, "-m", "girih.cli.main", "generate", "--model", str(directory), "--temperature", "0"]
    command += ["--max-tokens", str(num_tokens), "--dtype", "float32", "--json", *prompts]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answers = json.loads(done.stdout)["outputs"]
    return [(answer["prompt_token_ids"], answer["outputs"][0]["token_ids"]) for answer in answers]


def check_greedy_tokens(oracle: Oracle, prompt_token_ids: list[int], token_ids: list[int], num_tokens: int) -> None:
    """Compare with transformers' greedy decoding; a near tie may part the two, and is said."""
    expected = oracle.greedy(prompt_token_ids, num_tokens)
    if token_ids != expected:
        parted = next(i for i, (a, b) in enumerate(zip(token_ids, expected, strict=False)) if a != b)
        top = oracle.logits(prompt_token_ids, expected[: parted + 1])[-1].topk(2).values
        assert float(top[0] - top[1]) < NEAR_TIE, f"parted at output token {parted}: {token_ids} {expected}"
        print(f"near tie at output token {parted}: {float(top[0] - top[1]):.2g}")


def test_the_command_line_gives_transformers_greedy_tokens(directory, oracle) -> None:
    ((prompt_token_ids, token_ids),) = run_generate(directory, 16, "The capital of France is")
    check_greedy_tokens(oracle, prompt_token_ids, token_ids, 16)


@pytest.mark.soak
@pytest.mark.parametrize("language", TEXTS)
@pytest.mark.parametrize("lengths", [(1,), (2400,), (2, 15, 16, 17, 40, 255, 511, 512, 513, 1000)], ids=str)
def test_the_command_line_gives_transformers_greedy_tokens_for_every_length(
    directory, oracle, llm, language, lengths
) -> None:
    encode, decode = llm.tokenizer.encode, llm.tokenizer.decode
    texts = [decode(prompt_ids(encode, language, length, start=1)) for length in lengths]
    answers = run_generate(directory, 48, *texts)
    for length, (prompt_token_ids, token_ids) in zip(lengths, answers, strict=True):
        assert abs(len(prompt_token_ids) - length) <= max(3, length // 100)
        check_greedy_tokens(oracle, prompt_token_ids, token_ids, 48)
