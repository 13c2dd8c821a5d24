"""Both real models against transformers: logits of English, code and Japanese, in chunks over paged caches."""

import pytest
import torch
from oracle import oracle_of

from girih.checkpoint.tokenizer import Tokenizer
from tests.prompts import TEXTS, prompt_ids
from tests.step_driver import StepDriver, make_worker

pytestmark = pytest.mark.real_weights


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ("smollm2", "gemma3-270m")],
)
def directory(request, real_model):
    return real_model(request.param)


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer.from_directory(directory)


@pytest.fixture(scope="module")
def oracle(directory):
    return oracle_of(directory).model


@pytest.mark.parametrize("backend", ["auto", pytest.param("reference", marks=pytest.mark.soak)])
def test_float32_logits_match(directory, tokenizer, oracle, backend):
    driver = StepDriver(make_worker(directory, attention_backend=backend), pool_bytes=64 << 20, poison=True)
    runner, hidden = driver.worker.runner, []
    forward = runner._forward
    runner._forward = lambda flat: hidden.append(forward(flat)) or hidden[-1]
    for row, language in enumerate(TEXTS):
        tokens = prompt_ids(tokenizer.encode, language, 70)
        with torch.inference_mode():
            expected = oracle(torch.tensor([tokens])).logits[0]
        hidden.clear()
        driver.add(row, tokens)
        driver.run(row, 1, chunk=33)
        with torch.inference_mode():
            actual = runner.model.compute_logits(torch.cat(hidden))
        torch.testing.assert_close(actual, expected, atol=1e-3, rtol=0)


def test_with_an_int8_cache_the_text_stays_as_likely(directory, tokenizer, oracle):
    """Every next token of a text is about as likely as with the exact cache, and greedy text as sensible."""
    driver = StepDriver(make_worker(directory, kv_cache_dtype="int8"), pool_bytes=64 << 20, poison=True)
    prompts = [prompt_ids(tokenizer.encode, language, 70) for language in TEXTS]
    for row, tokens in enumerate(prompts):
        driver.add(row, tokens)
    rows = range(len(prompts))
    outputs = [driver.run(row, 1, chunk=33) for row in rows]
    for _ in range(23):
        for output, token in zip(outputs, driver.step(dict.fromkeys(rows, 1)).token_ids.tolist(), strict=True):
            output.append(token)
    for tokens, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = oracle(torch.tensor([tokens + output])).logits[0, len(tokens) - 1 : -1]
        gaps = logits.max(1).values - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        assert (gaps == 0).float().mean() >= 0.85, tokenizer.decode(output)
        assert gaps.max() < 0.5, tokenizer.decode(output)
