"""A hybrid model with recurrent layers through the whole engine: every answer is what its dense form gives.

Alone, in a batch, with every budget of tokens per step, after hits at exact tokens, after preemptions and moves.
"""

import functools
import random

import numpy as np
import pytest

from girih import LLM, SamplingParams
from girih.engine import bring_up
from tests.toy_recurrent import installed
from tests.toy_recurrent.checkpoint import Dense, save

TOKENS = [(7 * i * i + 11 * i) % 317 + 3 for i in range(400)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A toy checkpoint, while Girih knows the architecture."""
    with installed():
        yield save(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def dense(directory):
    return Dense(directory)


@pytest.fixture
def make_llm(directory):
    """Make an engine that checks the manager's invariants after every step."""
    llms = []

    def make(model=directory, **options):
        options = {
            "kv_cache_memory": "1MiB",
            "max_num_seqs": 16,
            "dtype": "float32",
            "check_invariants": True,
        } | options
        llms.append(LLM(str(model), **options))
        return llms[-1]

    yield make
    for llm in llms:
        llm.shutdown()


def greedy(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def answer(llm, prompt, max_tokens=8):
    (output,) = llm.generate([list(prompt)], greedy(max_tokens))
    return output


def poison(llm):
    """Fill the whole pool with what is no number."""
    worker = llm.core.executor._worker
    worker.buffer[: worker.kv_cache_config.pool_bytes].fill_(0xFF)


def test_the_plan_has_a_group_of_each_kind(make_llm):
    (config,) = make_llm().kv_cache_configs
    kinds = {group.retention.describe(): len(group.layers) for group in config.groups}
    assert kinds == {"recurrent state": 2, "sliding window 9": 1, "full attention": 1}


@pytest.mark.parametrize("budget", [*range(1, 18), 64])
def test_answers_are_equal_with_every_number_of_tokens_per_step(make_llm, dense, budget):
    llm = make_llm(max_num_batched_tokens=budget, max_num_seqs=min(4, budget))
    poison(llm)
    prompts = [TOKENS[:37], TOKENS[:1], TOKENS[50:71]]
    for output in llm.generate(prompts, greedy(8)):
        dense.check_greedy(output.prompt_token_ids, output.outputs[0].token_ids)


def test_answers_are_equal_alone_and_in_a_batch(make_llm, dense):
    prompts = [TOKENS[i : i + length] for i, length in enumerate((1, 5, 16, 17, 33, 60, 100, 2))]
    llm = make_llm(max_num_batched_tokens=48, enable_prefix_caching=False)
    poison(llm)
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy(12))]
    for prompt, tokens in zip(prompts, together, strict=True):
        assert tokens == answer(llm, prompt, 12).outputs[0].token_ids
        dense.check_greedy(prompt, tokens)


@pytest.mark.parametrize("length", [9, 16, 21, 40, 48])
def test_the_next_turn_of_a_chat_starts_at_the_exact_token(make_llm, dense, length):
    llm = make_llm()
    poison(llm)
    turn, num_computed = TOKENS[:length], 0
    for number in range(4):
        output = answer(llm, turn, 9)
        dense.check_greedy(turn, output.outputs[0].token_ids)
        assert output.num_cached_tokens == num_computed
        num_computed = len(turn) + 8  # all but the last sampled token
        turn = [*turn, *output.outputs[0].token_ids, *TOKENS[200 + number : 207 + 2 * number]]


def test_an_equal_prompt_is_computed_from_its_last_unit_on(make_llm, dense):
    llm = make_llm()
    first, second = answer(llm, TOKENS[:50]), answer(llm, TOKENS[:50])
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 48
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    dense.check_greedy(TOKENS[:50], second.outputs[0].token_ids)


def test_a_shared_prefix_is_reused_or_what_is_lost_for_want_of_its_state_is_counted(make_llm, dense):  # case 44
    """Three prompts of 80 tokens share 50: the third starts at token 48, where the second branched off."""
    llm = make_llm()
    prompts = [TOKENS[:50] + TOKENS[100 * i + 90 : 100 * i + 120] for i in range(3)]
    outputs = [answer(llm, prompt) for prompt in prompts]
    for prompt, output in zip(prompts, outputs, strict=True):
        dense.check_greedy(prompt, output.outputs[0].token_ids)
    assert outputs[2].num_cached_tokens == 48


def test_requests_that_share_a_prefix_and_run_at_once_go_on_by_themselves(make_llm, dense):
    llm = make_llm()
    answer(llm, TOKENS[:64], 1)
    prompts = [TOKENS[:64] + TOKENS[70 + i : 70 + 2 * i] for i in range(1, 9)]
    outputs = llm.generate(prompts, greedy(10))
    assert {output.num_cached_tokens for output in outputs} == {64}
    for output in outputs:
        dense.check_greedy(output.prompt_token_ids, output.outputs[0].token_ids)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_answers_survive_preemptions(make_llm, dense, enable_prefix_caching):
    llm = make_llm(
        kv_cache_memory="40KiB", max_model_len=128, max_num_batched_tokens=64,
        enable_prefix_caching=enable_prefix_caching,
    )  # fmt: skip
    poison(llm)
    prompts = [TOKENS[10 * i : 10 * i + 30] for i in range(8)]
    outputs = llm.generate(prompts, greedy(50))
    assert llm.stats().num_preemptions > 0
    for output in outputs:
        dense.check_greedy(output.prompt_token_ids, output.outputs[0].token_ids)


def converse(llm, dense, rng):
    """Let six conversations go on, begin like another or go back some turns; return the tokens that were hit."""
    poison(llm)
    conversations = [TOKENS[20 * i : 20 * i + rng.randint(3, 40)] for i in range(6)]
    num_hit = 0
    for _ in range(5):
        conversations[0] = conversations[rng.randrange(6)]
        conversations = [c if len(c) < 80 else c[: rng.randint(3, 60)] for c in conversations]
        asked = sorted(rng.sample(range(6), rng.randint(3, 6)))
        outputs = llm.generate([conversations[i] for i in asked], [greedy(rng.randint(1, 40)) for _ in asked])
        for i, output in zip(asked, outputs, strict=True):
            tokens = output.outputs[0].token_ids
            dense.check_greedy(conversations[i], tokens)
            num_hit += output.num_cached_tokens
            conversations[i] = [*conversations[i], *tokens, *rng.sample(TOKENS, rng.randint(1, 20))]
    return num_hit


def test_conversations_in_a_crowded_pool_are_answered_as_if_each_were_alone(make_llm, dense):
    """Prefixes are cached, evicted, moved and hit at random; with another pool and budget each time."""
    num_hit = num_evicted = num_moved = num_preempted = 0
    for seed, kib in enumerate((40, 44, 64)):
        rng = random.Random(seed)
        llm = make_llm(kv_cache_memory=f"{kib}KiB", max_model_len=128, max_num_batched_tokens=rng.choice((24, 40, 64)))
        num_hit += converse(llm, dense, rng)
        stats = llm.stats()
        num_evicted += stats.cache.pages_evicted
        num_moved += stats.cache.pages_moved
        num_preempted += stats.num_preemptions
    assert min(num_hit, num_evicted, num_moved, num_preempted) > 0


@pytest.mark.parametrize("distance", [16, 48])
def test_prompts_with_a_checkpoint_every_few_tokens_are_reused_at_each(make_llm, dense, monkeypatch, distance):
    manager = functools.partial(bring_up.KVCacheManager, state_checkpoint_tokens=distance)
    monkeypatch.setattr(bring_up, "KVCacheManager", manager)
    llm = make_llm(max_num_batched_tokens=3 * distance)  # no more checkpoints in a step than a row may have
    poison(llm)
    dense.check_greedy(TOKENS[:150], answer(llm, TOKENS[:150]).outputs[0].token_ids)
    for shared in (20, 50, 64, 101, 149):
        prompt = TOKENS[:shared] + TOKENS[160 + shared : 163 + shared]
        output = answer(llm, prompt)
        assert output.num_cached_tokens >= shared // distance * distance
        dense.check_greedy(prompt, output.outputs[0].token_ids)
    assert llm.stats().cache.checkpoints >= 150 // distance


def test_a_model_of_recurrent_layers_alone_has_one_group_and_no_block_table(make_llm, tmp_path):  # case 105
    directory = save(tmp_path, layer_types=["recurrent"] * 3)
    llm, dense = make_llm(directory, kv_cache_memory="32KiB", max_num_batched_tokens=24), Dense(directory)
    poison(llm)
    assert [group.retention.holds_state for group in llm.kv_cache_configs[0].groups] == [True]
    prompts = [TOKENS[i : i + 40] for i in range(12)]
    for output in llm.generate(prompts, greedy(10)):
        dense.check_greedy(output.prompt_token_ids, output.outputs[0].token_ids)
    turn = [*prompts[-1], *output.outputs[0].token_ids, 5, 6, 7]
    output = answer(llm, turn)
    assert output.num_cached_tokens == 49
    dense.check_greedy(turn, output.outputs[0].token_ids)


def test_an_int8_cache_and_float32_states_go_together(make_llm, dense):
    llm = make_llm(kv_cache_dtype="int8")
    poison(llm)
    caches = llm.core.executor._worker.runner.context.kv_caches
    assert {name: str(t.dtype) for name, t in caches["model.layers.3.mixer"].tensors.items()} == {
        "key": "torch.int8", "value": "torch.int8", "key_scale": "torch.float32", "value_scale": "torch.float32",
    }  # fmt: skip
    output = answer(llm, TOKENS[:60], 16).outputs[0].token_ids
    logits = dense.logits([*TOKENS[:60], *output])[59:-1].numpy()
    gaps = logits.max(axis=1) - np.take_along_axis(logits, np.array(output)[:, None], 1)[:, 0]
    assert np.median(gaps) == 0
    assert gaps.max() < 0.5
