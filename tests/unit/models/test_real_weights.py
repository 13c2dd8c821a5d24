"""Both real models against transformers: logits of English, code and Japanese, in chunks over paged caches."""

import pytest
import torch

from girih.checkpoint.tokenizer import Tokenizer
from tests.prompts import TEXTS, prompt_ids
from tests.step_driver import StepDriver, make_worker
from tests.tiny_models import reference_model

pytestmark = pytest.mark.real_weights


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_float32_logits_match(real_model, name):
    directory = real_model(name)
    encode = Tokenizer.from_directory(directory).encode
    oracle = reference_model(directory)
    driver = StepDriver(make_worker(directory), pool_bytes=64 << 20, poison=True)
    runner, hidden = driver.worker.runner, []
    forward = runner._forward
    runner._forward = lambda flat: hidden.append(forward(flat)) or hidden[-1]
    for row, language in enumerate(TEXTS):
        tokens = prompt_ids(encode, language, 70)
        with torch.inference_mode():
            expected = oracle(torch.tensor([tokens])).logits[0]
        hidden.clear()
        driver.add(row, tokens)
        driver.run(row, 1, chunk=33)
        with torch.inference_mode():
            actual = runner.model.compute_logits(torch.cat(hidden))
        torch.testing.assert_close(actual, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_with_an_int8_cache_the_text_stays_as_likely(real_model, name):
    """Every next token of a text is about as likely as with the exact cache, and greedy text as sensible."""
    directory = real_model(name)
    tokenizer = Tokenizer.from_directory(directory)
    driver = StepDriver(make_worker(directory, kv_cache_dtype="int8"), pool_bytes=64 << 20, poison=True)
    oracle = reference_model(directory)
    for row, language in enumerate(TEXTS):
        tokens = prompt_ids(tokenizer.encode, language, 70)
        driver.add(row, tokens)
        output = driver.run(row, 24, chunk=33)
        with torch.inference_mode():
            logits = oracle(torch.tensor([tokens + output])).logits[0, len(tokens) - 1 : -1]
        gaps = logits.max(1).values - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        assert (gaps == 0).float().mean() >= 0.85, (language, tokenizer.decode(output))
        assert gaps.max() < 0.5, (language, tokenizer.decode(output))
