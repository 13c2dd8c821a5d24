"""Both architectures against transformers, on tiny random models: logits, and greedy tokens computed in every way."""

from functools import cache
from pathlib import Path

import pytest
import torch

from tests.dense_attention import through_int8
from tests.step_driver import StepDriver, make_worker
from tests.tiny_models import reference_greedy, reference_model, tiny_gemma3, tiny_llama

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
VARIANTS = {
    "llama": (tiny_llama, {}),
    "llama-untied-biased": (
        tiny_llama, {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3},
    ),
    "llama-mha-linear-rope": (
        tiny_llama, {"num_key_value_heads": 4, "rope_parameters": LINEAR_ROPE},
    ),
    "llama-mqa-llama3-rope": (tiny_llama, {"num_key_value_heads": 1, "rope_parameters": LLAMA3_ROPE}),
    "llama-wide-heads": (tiny_llama, {"head_dim": 24}),
    "gemma3": (tiny_gemma3, {}),
    "gemma3-window-1": (tiny_gemma3, {"sliding_window": 1}),
    "gemma3-window-2": (tiny_gemma3, {"sliding_window": 2}),
    "gemma3-window-17": (tiny_gemma3, {"sliding_window": 17}),
    "gemma3-untied-linear-rope": (
        tiny_gemma3, {"tie_word_embeddings": False, "attention_bias": True, "rope_parameters": GEMMA_ROPES},
    ),
    "gemma3-all-sliding": (tiny_gemma3, {"layer_types": ["sliding_attention"] * 3}),
}  # fmt: skip
PROMPT = [(7 * i * i + 11 * i) % 317 + 3 for i in range(90)]


@pytest.fixture(scope="module")
def variant(tmp_path_factory):
    """Build a variant once, with transformers' model of it."""

    @cache
    def build(name: str) -> tuple[Path, object]:
        make, overrides = VARIANTS[name]
        directory = make(tmp_path_factory.mktemp(name), **overrides)
        return directory, reference_model(directory)

    return build


def all_logits(driver: StepDriver, row: int, chunk: int) -> torch.Tensor:
    """Compute PROMPT in a row, in chunks, and return float32 logits [len(PROMPT), vocab_size]."""
    runner, hidden = driver.worker.runner, []
    forward = runner._forward
    runner._forward = lambda flat: hidden.append(forward(flat)) or hidden[-1]
    driver.add(row, PROMPT)
    while driver.num_computed[row] < len(PROMPT):
        driver.step({row: min(chunk, len(PROMPT) - driver.num_computed[row])})
    runner._forward = forward
    with torch.inference_mode():
        return runner.model.compute_logits(torch.cat(hidden))


@pytest.mark.parametrize("name", VARIANTS)
def test_float32_logits_of_every_position_match(variant, name):
    directory, oracle = variant(name)
    with torch.inference_mode():
        expected = oracle(torch.tensor([PROMPT])).logits[0]
    driver = StepDriver(make_worker(directory), block_size=16, poison=True)
    for row, chunk in enumerate((len(PROMPT), 1, 23)):
        torch.testing.assert_close(all_logits(driver, row, chunk), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma3-untied-linear-rope"])
def test_bfloat16_follows_the_order_of_casts(variant, name):
    """Half of bfloat16's own error is allowed: a cast in another place, e.g. in a norm, makes a larger one."""
    directory, oracle32 = variant(name)
    oracle = reference_model(directory, torch.bfloat16)
    with torch.inference_mode():
        expected, exact = oracle(torch.tensor([PROMPT])).logits[0].float(), oracle32(torch.tensor([PROMPT])).logits[0]
    driver = StepDriver(make_worker(directory, dtype="bfloat16"))
    logits = all_logits(driver, 0, len(PROMPT))
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().mean() < 0.5 * (expected - exact).abs().mean()


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_greedy_tokens_are_equal_for_every_chunk_size(variant, name, block_size):
    directory, oracle = variant(name)
    prompt = PROMPT[:37]
    expected = reference_greedy(oracle, prompt, 12)
    driver = StepDriver(make_worker(directory, max_num_seqs=20), block_size=block_size, poison=True)
    for chunk in range(1, 18):
        driver.add(chunk, prompt)
        assert driver.run(chunk, 12, chunk) == expected, chunk


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma3-window-2", "gemma3-window-17"])
def test_prompts_around_block_and_window_boundaries(variant, name):
    """From window 2 on: transformers' own cache keeps everything for a window of 1; its logits without cache agree."""
    directory, oracle = variant(name)
    worker = make_worker(directory, max_num_seqs=32)
    driver = StepDriver(worker, poison=True)
    window = getattr(oracle.config, "sliding_window", None) or 1
    lengths = sorted({1, 2, 15, 16, 17, 31, 32, 33, max(1, window - 1), window, window + 1})
    for row, length in enumerate(lengths):
        driver.add(row, PROMPT[:length])
        assert driver.run(row, 4) == reference_greedy(oracle, PROMPT[:length], 4), length


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_of_one_batch_do_not_touch_each_other(variant, name):
    """Prefill chunks and decodes of many lengths in the same steps give what each row gives alone."""
    directory, oracle = variant(name)
    driver = StepDriver(make_worker(directory), poison=True)
    prompts = {row: PROMPT[row : row + length] for row, length in enumerate((1, 5, 16, 33, 60, 80))}
    outputs: dict[int, list[int]] = {row: [] for row in prompts}
    for row, prompt in prompts.items():
        driver.add(row, prompt)
    for _ in range(40):
        work = {
            row: min(5 + row, driver.num_known[row] - driver.num_computed[row])
            for row in prompts
            if len(outputs[row]) < 8
        }
        if work:
            output = driver.step(work)
            for row, token in zip(output.rows.tolist(), output.token_ids.tolist(), strict=True):
                outputs[row].append(token)
    for row, prompt in prompts.items():
        assert outputs[row] == reference_greedy(oracle, prompt, 8), row


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_of_one_step_can_read_the_prefix_pages_another_writes(variant, name):
    """Row 1 shares the blocks that row 0 computes in the very same step: all is written before any row attends."""
    directory, oracle = variant(name)
    driver = StepDriver(make_worker(directory), poison=True)
    driver.add(0, PROMPT[:40])
    driver.reserve(0, 40)
    driver.add(1, PROMPT[:32] + PROMPT[60:70], share_from=0, num_shared=32)
    output = driver.step({0: 40, 1: 10})
    expected = [reference_greedy(oracle, prompt, 1)[0] for prompt in (PROMPT[:40], PROMPT[:32] + PROMPT[60:70])]
    assert output.token_ids.tolist() == expected


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_pages_that_change_place_before_any_step_change_no_token(variant, name, seed):
    directory, oracle = variant(name)
    driver = StepDriver(make_worker(directory), poison=True, seed=seed)
    prompts, outputs = {0: PROMPT[:41], 1: PROMPT[30:90]}, {0: [], 1: []}
    for row, prompt in prompts.items():
        driver.add(row, prompt)
    for _ in range(25):
        for group in range(len(driver.config.groups)):
            driver.move(group, driver.rng.randint(0, 6))
        output = driver.step({row: min(7, driver.num_known[row] - driver.num_computed[row]) for row in prompts})
        for row, token in zip(output.rows.tolist(), output.token_ids.tolist(), strict=True):
            outputs[row].append(token)
    for row, prompt in prompts.items():
        assert outputs[row] == reference_greedy(oracle, prompt, len(outputs[row]))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_prefix_that_ends_inside_a_block_is_written_on_in_a_copy(variant, name):
    directory, oracle = variant(name)
    driver = StepDriver(make_worker(directory), poison=True)
    driver.add(0, PROMPT[:40])
    expected = driver.run(0, 1)
    for row, num_shared in enumerate((39, 38, 35, 33), start=1):
        prompt = PROMPT[:num_shared] + PROMPT[60 : 60 + row]
        driver.add(row, prompt, share_from=0, num_shared=num_shared)
        assert driver.run(row, 4) == reference_greedy(oracle, prompt, 4), num_shared
    assert expected + driver.run(0, 5) == reference_greedy(oracle, PROMPT[:40], 6)


@pytest.fixture(scope="module")
def int8_attention():
    """Teach transformers an attention that takes keys and values through int8, as the cache does."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask
    from transformers.models.gemma3.modeling_gemma3 import eager_attention_forward

    def attend(module, query, key, value, mask, **options):
        key, value = (through_int8(x).to(x.dtype) for x in (key, value))
        return eager_attention_forward(module, query, key, value, mask, **options)

    AttentionInterface.register("through_int8", attend)
    AttentionMaskInterface.register("through_int8", eager_mask)
    return "through_int8"


@pytest.mark.parametrize("name", ["llama", "llama-wide-heads", "gemma3", "gemma3-window-17"])
def test_an_int8_cache_gives_what_transformers_gives_with_keys_and_values_through_int8(variant, name, int8_attention):
    directory, plain = variant(name)
    oracle = reference_model(directory)
    oracle.set_attn_implementation(int8_attention)
    with torch.inference_mode():
        expected, exact = (model(torch.tensor([PROMPT])).logits[0] for model in (oracle, plain))
    driver = StepDriver(make_worker(directory, kv_cache_dtype="int8"), poison=True)
    assert {tensor.dtype for cache in driver.caches.values() for tensor in cache.tensors.values()} == {
        torch.int8, torch.float32,
    }  # fmt: skip
    for row, chunk in enumerate((len(PROMPT), 1, 23)):
        logits = all_logits(driver, row, chunk)
        # a key that lies between two steps may go to either, where the last bits of its sums differ
        assert (logits - expected).abs().mean() < 0.05 * (expected - exact).abs().mean()
    driver.add(3, PROMPT[:37])
    tokens = driver.run(3, 12)
    with torch.inference_mode():
        logits = oracle(torch.tensor([PROMPT[:37] + tokens])).logits[0, 36:-1]
    assert (logits.max(1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]).max() < 0.02
