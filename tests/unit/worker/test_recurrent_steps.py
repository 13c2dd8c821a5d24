"""Recurrent layers on a real worker: the toy gives what its dense form gives, however its states come and go.

Every page is NaN before its first use and after its last.
"""

import random

import pytest
import torch

from girih import arch
from girih.checkpoint.hf_config import load_config
from girih.errors import BindingError
from girih.kv.config import KVCacheConfig, KVCacheGroupSpec, KVCacheLayer
from girih.kv.specs.full_attention import FullAttentionRetention
from girih.kv.specs.sliding_window import SlidingWindowRetention
from girih.kv.specs.state import StateRetention
from girih.worker.model_runner import WARM_UP_TOKENS
from tests.step_driver import StepDriver, make_worker
from tests.toy_recurrent import installed
from tests.toy_recurrent.checkpoint import Dense, save

PROMPT = [(7 * i * i + 11 * i) % 317 + 3 for i in range(90)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A toy checkpoint, while Girih knows the architecture."""
    with installed():
        yield save(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def dense(directory):
    return Dense(directory)


def make_driver(directory, **options):
    options = {"poison": True} | options
    return StepDriver(make_worker(directory, max_num_seqs=24), **options)


def mixed_block_sizes(worker, first_group=0):
    """Return a plan with blocks of 4 tokens for full and 32 for sliding attention, and what a state group says: 16."""
    kinds = {
        "recurrent": (StateRetention(), 16),
        "full_attention": (FullAttentionRetention(), 4),
        "sliding_attention": (SlidingWindowRetention(9), 32),
    }
    specs, types = worker.get_kv_cache_spec(), worker.runner.model.model.kinds
    groups, slab_bytes = [], 12_288
    for kind, (retention, block_size) in kinds.items():
        layers, end = [], 0
        for layer_kind, (name, spec) in zip(types, specs.items(), strict=True):
            if layer_kind == kind:
                layers.append(KVCacheLayer(name, spec, end))
                end += spec.page_size_bytes(block_size)
        pages_per_slab = next(k for k in (8, 4, 3, 2, 1) if end * k <= slab_bytes)
        stride = slab_bytes // pages_per_slab
        groups.append(KVCacheGroupSpec(retention, block_size, tuple(layers), end, stride, pages_per_slab))
    return KVCacheConfig(300, slab_bytes, tuple(groups), 256, first_group=first_group)


def test_every_layer_asks_for_what_config_json_promised(directory):
    config, worker = load_config(directory), make_worker(directory)
    dtypes = arch.CacheDtypes(kv="float32", activation="float32")
    assert worker.get_kv_cache_spec() == arch.load(config).kv_cache_specs(config, dtypes, block_size_multiple=1)


def test_a_profile_step_runs_through_recurrent_layers_too(directory):
    worker = make_worker(directory, max_num_batched_tokens=64, max_model_len=100)
    seen = []
    layers = worker.runner.model.model.layers
    for index in (0, 1, 3):
        layers[index].mixer.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    assert worker.determine_available_memory().available_bytes > 0
    small = WARM_UP_TOKENS + 1
    assert seen == [small] * 3 + [64] * 3, "a small step to warm up, then the largest"


@pytest.mark.parametrize("chunk", [90, 1, 23])
def test_logits_of_every_position_match_the_dense_form(directory, dense, chunk):
    driver = make_driver(directory)
    runner, hidden = driver.worker.runner, []
    forward = runner._forward
    runner._forward = lambda flat: hidden.append(forward(flat)) or hidden[-1]
    driver.add(0, PROMPT)
    driver.run(0, 1, chunk)
    with torch.inference_mode():
        logits = runner.model.compute_logits(torch.cat(hidden))
    torch.testing.assert_close(logits.double(), dense.logits(PROMPT), atol=2e-4, rtol=0)


def test_greedy_tokens_are_equal_for_every_chunk_size(directory, dense):
    prompt = PROMPT[:37]
    expected = dense.greedy(prompt, 12)
    driver = make_driver(directory)
    for chunk in range(1, 18):
        driver.add(chunk, prompt)
        assert driver.run(chunk, 12, chunk) == expected, chunk


def test_bfloat16_states_follow_float32_ones_and_keep_their_sums_finer(directory):
    driver = StepDriver(make_worker(directory, dtype="bfloat16"))
    state = driver.caches["model.layers.0.mixer"].tensors
    assert [tensor.dtype for tensor in state.values()] == [torch.bfloat16, torch.float32]
    driver.add(0, PROMPT)
    driver.add(1, PROMPT)
    at_once, in_chunks = driver.run(0, 6), driver.run(1, 6, chunk=7)
    assert at_once == in_chunks


def test_rows_of_one_batch_do_not_touch_each_other(directory, dense):
    """Prompts, chunks of one token and decodes in the same steps give what each row gives alone."""
    driver = make_driver(directory)
    prompts = {row: PROMPT[row : row + length] for row, length in enumerate((1, 2, 5, 16, 33, 60, 80))}
    outputs = {row: [] for row in prompts}
    for row, prompt in prompts.items():
        driver.add(row, prompt)
    step = 0
    while unfinished := [row for row in prompts if len(outputs[row]) < 8]:
        known = {row: driver.num_known[row] - driver.num_computed[row] for row in unfinished}
        work = {row: min(1 + (row + step) % 4 * 5, rest) for row, rest in known.items()}
        output = driver.step(work)
        step += 1
        for row, token in zip(output.rows.tolist(), output.token_ids.tolist(), strict=True):
            outputs[row].append(token)
    for row, prompt in prompts.items():
        dense.check_greedy(prompt, outputs[row])


@pytest.mark.parametrize("seed", range(4))
def test_cuts_change_nothing_and_every_one_is_a_place_to_start_from(directory, dense, seed):
    """Cuts at random tokens of random chunks; then other rows start from each, in the middle of blocks too."""
    rng, driver = random.Random(seed), make_driver(directory, seed=seed)
    tokens = PROMPT[:60]
    driver.add(0, tokens)
    while driver.num_computed[0] < 60:
        chunk = min(rng.choice((1, 3, 16, 25)), 60 - driver.num_computed[0])
        driver.step({0: chunk}, {0: [rng.randint(1, chunk) for _ in range(rng.randint(0, 3))]})
    tokens += driver.outputs[-1].token_ids.tolist()
    for _ in range(6):
        cuts = {0: [1]} if rng.random() < 0.5 else {}
        tokens += driver.step({0: 1}, cuts).token_ids.tolist()
    dense.check_greedy(PROMPT[:60], tokens[60:])
    places = {
        num_tokens for _, _, num_tokens in driver.checkpoints if num_tokens >= 48 + 8
    }  # row 0 has the window from 48 on
    assert len(places) > 1
    for row, num_tokens in enumerate(sorted(places), start=1):
        prompt = tokens[:num_tokens] + PROMPT[70 : 71 + row]
        driver.add(row, prompt, share_from=0, num_shared=num_tokens)
        dense.check_greedy(prompt, driver.run(row, 4))
    assert driver.step({0: 1}).rows.tolist() == [0]
    dense.check_greedy(PROMPT[:60], tokens[60:] + driver.outputs[-1].token_ids.tolist())


def test_a_chat_goes_on_at_the_exact_token_where_the_last_turn_ended(directory, dense):
    driver = make_driver(directory)
    driver.add(0, PROMPT[:21])
    first = driver.run(0, 9)
    driver.step({0: 1}, {0: [1]})  # the finish: what is computed now includes all but the token just sampled
    conversation = PROMPT[:21] + first
    turn = [*conversation, *PROMPT[40:47]]
    driver.add(1, turn, share_from=0, num_shared=len(conversation))
    driver.drop(0)
    output = driver.run(1, 5)
    assert driver.outputs[-5].rows.tolist() == [1]
    dense.check_greedy(turn, output)


def test_several_rows_start_from_one_checkpoint_in_the_step_that_another_goes_on_from_it(directory, dense):
    driver = make_driver(directory)
    driver.add(0, PROMPT[:48])
    driver.step({0: 32}, {0: [32]})
    prompts = {row: PROMPT[:32] + PROMPT[50 : 50 + row] for row in (1, 2, 9)}
    for row, prompt in prompts.items():
        driver.add(row, prompt, share_from=0, num_shared=32)
    output = driver.step({0: 16, **{row: len(prompt) - 32 for row, prompt in prompts.items()}})
    tokens = dict(zip(output.rows.tolist(), output.token_ids.tolist(), strict=True))
    for row, prompt in {0: PROMPT[:48], **prompts}.items():
        dense.check_greedy(prompt, [tokens[row]])


def test_a_preempted_row_starts_again_from_nothing_in_another_row_and_page(directory, dense):
    driver = make_driver(directory)
    driver.add(0, PROMPT[:30])
    tokens = driver.run(0, 6)
    driver.drop(0)
    driver.add(5, PROMPT[:30] + tokens, num_prompt=30)
    driver.add(0, PROMPT[50:55])
    assert driver.run(5, 1, chunk=1) + driver.run(5, 5) == dense.greedy(PROMPT[:30] + tokens, 6)
    dense.check_greedy(PROMPT[50:55], driver.run(0, 4))


def test_a_row_that_gets_one_token_of_its_prompt_does_not_take_its_page_for_its_state(directory, dense):  # case 46
    driver = make_driver(directory, poison=False)
    driver.free_pages = [pages[-3:] if g in driver.state_groups else pages for g, pages in enumerate(driver.free_pages)]
    driver.add(0, PROMPT[:40])
    driver.run(0, 3)
    driver.drop(0)
    driver.add(1, PROMPT[20:35])
    driver.add(2, PROMPT[50:55])
    driver.step({1: 15, 2: 1})  # the first chunk of row 2 looks like a decode, in the page that row 0 had
    dense.check_greedy(PROMPT[50:55], driver.run(2, 6))


def test_what_is_in_the_pages_does_not_change_a_bit_of_the_logits(directory):  # case 47
    def logits(fill):
        driver = make_driver(directory, poison=False)
        for cache in driver.caches.values():
            for tensor in cache.tensors.values():
                tensor[:-1] = fill
        computed, compute = [], driver.worker.runner.model.compute_logits
        driver.worker.runner.model.compute_logits = lambda hidden: (
            computed.append(compute(hidden).clone()) or computed[-1]
        )
        driver.add(0, PROMPT[:5])
        driver.add(1, PROMPT[:40])
        driver.step({0: 1, 1: 17})
        driver.step({0: 4, 1: 23})
        driver.step({0: 1, 1: 1})
        return torch.cat(computed)

    fresh = logits(0.0)
    assert torch.equal(logits(7.0), fresh)
    assert torch.equal(logits(torch.nan), fresh)


@pytest.mark.parametrize("first_group", [0, 3])
def test_every_group_counts_by_its_own_block_size_and_from_its_own_first_group(
    directory, dense, first_group
):  # case 48
    worker = make_worker(directory)
    driver = StepDriver(worker, config=mixed_block_sizes(worker, first_group), poison=True)
    assert driver.num_bound == [2400, 2400, 900]
    driver.add(0, PROMPT[:50])
    driver.step({0: 41}, {0: [32]})
    driver.add(1, PROMPT[:32] + PROMPT[70:80], share_from=0, num_shared=32)
    output = driver.step({0: 9, 1: 10})
    for row, prompt in enumerate((PROMPT[:50], PROMPT[:32] + PROMPT[70:80])):
        dense.check_greedy(prompt, [int(output.token_ids[row]), *driver.run(row, 20)])


@pytest.mark.parametrize("seed", range(3))
def test_pages_that_change_place_before_any_step_change_no_token(directory, dense, seed):
    worker = make_worker(directory)
    driver = StepDriver(worker, config=mixed_block_sizes(worker), poison=True, seed=seed)
    prompts, outputs = {0: PROMPT[:41], 1: PROMPT[30:90]}, {0: [], 1: []}
    for row, prompt in prompts.items():
        driver.add(row, prompt)
    for step in range(30):
        for group in range(3):
            driver.move(group, driver.rng.randint(0, 6))
        work = {row: min(7, driver.num_known[row] - driver.num_computed[row]) for row in prompts}
        output = driver.step(work, {0: [1]} if step == 4 else {})
        for row, token in zip(output.rows.tolist(), output.token_ids.tolist(), strict=True):
            outputs[row].append(token)
    for row, prompt in prompts.items():
        dense.check_greedy(prompt, outputs[row])
    (place,) = {num_tokens for _, _, num_tokens in driver.checkpoints}
    assert place == 29


def test_a_step_without_rows_only_changes_the_cache(directory, dense):
    driver = make_driver(directory)
    driver.add(0, PROMPT[:40])
    tokens = driver.run(0, 2)
    for group in range(3):
        driver.move(group, 5)
    output = driver.step({})
    assert (output.step_id, output.rows.size, output.token_ids.size) == (2, 0, 0)
    dense.check_greedy(PROMPT[:40], tokens + driver.run(0, 6))


def test_a_state_is_never_written_to_the_null_page(directory):
    driver = make_driver(directory)
    driver.add(0, PROMPT[:5])
    (group,) = driver.state_groups
    null_id = driver.config.null_block_id(group)
    driver.free_pages[group] = [null_id]
    with pytest.raises(BindingError, match=f"a state would be written to page {null_id} of group {group}"):
        driver.step({0: 5}, {0: [2]})
