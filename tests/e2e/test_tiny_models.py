"""Tiny models of both architectures through the whole engine, against transformers, in every way to run."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from oracle import Oracle, check_outputs
from tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, reference_greedy, reference_model, tiny_gemma3, tiny_llama

from girih import LLM, SamplingParams, plugins
from girih.kv.capacity import peak_pages

BUILDERS = {"llama": tiny_llama, "gemma3": tiny_gemma3}
WINDOW = 8  # of tiny gemma3's sliding layers
BACKENDS = plugins.available("girih.attention")
LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 15, 16, 17, 40)
NUM_TOKENS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=5)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # these models are smaller than the cost of sharing them
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=BUILDERS)
def directory(request, tmp_path_factory):
    return BUILDERS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def reference(directory):
    return reference_model(directory)


@pytest.fixture(scope="module")
def oracle(directory):
    return Oracle(directory)


@pytest.fixture(scope="module")
def expected(reference):
    """Return transformers' greedy output of a prompt, computed once each."""
    known = {}

    def greedy(prompt, num_tokens=NUM_TOKENS):
        key = (*prompt, -num_tokens)
        if key not in known:
            known[key] = reference_greedy(reference, list(prompt), num_tokens)
        return known[key]

    return greedy


@pytest.fixture(scope="module")
def llm(directory):
    with make_llm(directory) as llm:
        yield llm


def make_llm(directory, **options):
    return LLM(str(directory), **{"kv_cache_memory": "2MiB", "block_size": 4, "check_invariants": True, **options})


def prompt(length, seed=0):
    return np.random.default_rng([seed, length]).integers(3, VOCAB_SIZE, length).tolist()


def tokens(output, index=0):
    assert output.error is None
    return output.outputs[index].token_ids


def pool_for(config, num_tokens, num_requests):
    """Return the bytes in which about so many requests of this length fit."""
    pages = peak_pages(config.groups, num_tokens)
    each = sum(n * group.page_stride_bytes for n, group in zip(pages, config.groups, strict=True))
    return int(each * num_requests) + config.null_page_bytes + config.slab_bytes


@pytest.mark.parametrize("length", LENGTHS)
def test_alone(llm, expected, oracle, length):
    (output,) = llm.generate([prompt(length)], GREEDY)
    assert tokens(output) == expected(prompt(length))
    check_outputs(oracle, [output])
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_batched(directory, expected, oracle, block_size, backend):
    prompts = [prompt(length, seed) for seed in range(2) for length in LENGTHS]
    with make_llm(directory, block_size=block_size, attention_backend=backend) as llm:
        outputs = llm.generate(prompts, GREEDY)
    assert [tokens(output) for output in outputs] == [expected(p) for p in prompts]
    check_outputs(oracle, outputs)


@pytest.mark.parametrize(("backend", "chunk"), [*(("auto", chunk) for chunk in range(1, 18)), ("reference", 7)])
def test_every_chunk_size(directory, expected, oracle, backend, chunk):
    prompts = [prompt(40), prompt(17)]
    with make_llm(directory, max_num_batched_tokens=chunk, attention_backend=backend) as llm:
        outputs = llm.generate(prompts, GREEDY)
        assert llm.stats().num_steps >= 57 // chunk
    assert [tokens(output) for output in outputs] == [expected(p) for p in prompts]
    check_outputs(oracle, outputs)


def test_after_a_prefix_hit(directory, expected, oracle):
    with make_llm(directory) as llm:
        for length in (8, 9, 40):
            again = [llm.generate([prompt(length)], GREEDY)[0] for _ in range(2)]
            assert [output.num_cached_tokens for output in again] == [0, (length - 1) // 4 * 4]
            assert [tokens(output) for output in again] == [expected(prompt(length))] * 2
            check_outputs(oracle, again)
        longer = prompt(40) + expected(prompt(40))  # a conversation that goes on
        (output,) = llm.generate([longer], GREEDY)
        assert output.num_cached_tokens >= 40
        assert tokens(output) == expected(longer)
        check_outputs(oracle, [output])


def test_requests_of_one_step_share_pages(directory, expected, oracle):
    with make_llm(directory) as llm:
        outputs = llm.generate([prompt(40), prompt(40), [*prompt(40)[:24], 5]], GREEDY)
    assert [output.num_cached_tokens for output in outputs] == [0, 36, 24]
    assert [tokens(output) for output in outputs] == [expected(output.prompt_token_ids) for output in outputs]
    check_outputs(oracle, outputs)


def test_requests_read_a_prefix_together(directory, expected, oracle):
    with make_llm(directory) as llm:
        outputs = llm.generate([prompt(90) + prompt(7 * i + 1, i) for i in range(4)], GREEDY)
    assert [output.num_cached_tokens for output in outputs] == [0, 88, 88, 88]
    assert [tokens(output) for output in outputs] == [expected(output.prompt_token_ids) for output in outputs]
    check_outputs(oracle, outputs)


def test_after_preemption(directory, expected, oracle):
    prompts = [prompt(30, seed) for seed in range(5)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=5)
    with make_llm(directory) as llm:
        memory = pool_for(llm.kv_cache_configs[0], 70, 2.2)
    with make_llm(directory, kv_cache_memory=memory) as llm:
        outputs = llm.generate(prompts, params)
        assert llm.stats().num_preemptions > 0
    assert [tokens(output) for output in outputs] == [expected(p, 40) for p in prompts]
    check_outputs(oracle, outputs)


def test_after_a_tenant_that_left_nothing_but_nan(directory, expected, oracle):
    """Case 47, for attention: what a page held before must not matter, also where it is not written anew."""
    with make_llm(directory) as llm:
        for cache in llm.core.executor._worker.runner.context.kv_caches.values():
            for tensor in cache.tensors.values():
                tensor[:-1] = torch.nan  # all pages but the null page
        outputs = llm.generate([prompt(length) for length in LENGTHS], GREEDY)
    assert [tokens(output) for output in outputs] == [expected(prompt(length)) for length in LENGTHS]
    check_outputs(oracle, outputs)


def test_three_completions(llm, expected, oracle):
    (output,) = llm.generate([prompt(17)], dataclasses.replace(GREEDY, n=3))
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert [tokens(output, i) for i in range(3)] == [expected(prompt(17))] * 3
    check_outputs(oracle, [output])


def test_64_mixed_requests_in_a_pool_that_holds_a_quarter_of_them(directory, expected):
    generator = np.random.default_rng(7)
    prompts = [prompt(int(generator.integers(1, 60)), seed) for seed in range(64)]
    params = [
        SamplingParams(temperature=0, max_tokens=int(generator.integers(1, 40)), ignore_eos=True) for _ in prompts
    ]
    with make_llm(directory, max_num_seqs=64) as llm:
        memory = pool_for(llm.kv_cache_configs[0], 50, 16)
    with make_llm(directory, kv_cache_memory=memory, max_num_seqs=64, max_num_batched_tokens=128) as llm:
        outputs = llm.generate(prompts, params)
        assert llm.stats().num_preemptions > 0
        assert llm.stats().kv_cache_usage == 0
    for output, its_params in zip(outputs, params, strict=True):
        assert tokens(output) == expected(output.prompt_token_ids, 40)[: its_params.max_tokens]


# ---- sampling


RANDOM = {"temperature": 1.5, "top_k": 50, "top_p": 0.95, "max_tokens": 12, "ignore_eos": True}


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_after_preemption(directory, llm):
    prompts = [prompt(30, seed) for seed in range(5)]
    params = [SamplingParams(**{**RANDOM, "max_tokens": 40}, seed=seed) for seed in range(5)]
    alone = [tokens(llm.generate([p], q)[0]) for p, q in zip(prompts, params, strict=True)]
    assert [tokens(output) for output in llm.generate(prompts, params)] == alone
    with make_llm(directory, kv_cache_memory=pool_for(llm.kv_cache_configs[0], 70, 2.2)) as small:
        assert [tokens(output) for output in small.generate(prompts, params)] == alone
        assert small.stats().num_preemptions > 0


def test_completion_i_is_seeded_with_seed_plus_i(llm):
    (together,) = llm.generate([prompt(9)], SamplingParams(**RANDOM, n=3, seed=2**63 - 2))
    each = [llm.generate([prompt(9)], SamplingParams(**RANDOM, seed=s))[0] for s in (2**63 - 2, 2**63 - 1, -(2**63))]
    assert [tokens(together, i) for i in range(3)] == [tokens(output) for output in each]
    assert len({tuple(tokens(together, i)) for i in range(3)}) == 3


def test_requests_without_a_seed_differ_and_an_engine_s_seed_repeats_them(directory):
    runs = []
    for seed in (3, 3, 4):
        with make_llm(directory, seed=seed) as llm:
            outputs = llm.generate([prompt(9)] * 2, SamplingParams(**RANDOM, n=2))
            runs.append([tokens(output, i) for output in outputs for i in range(2)])
    assert runs[0] == runs[1] != runs[2]
    assert len(set(map(tuple, runs[0]))) == 4


def test_log_probabilities_are_the_model_s_own(llm, reference):
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    (output,) = llm.generate([prompt(21)], params)
    ids = output.prompt_token_ids + tokens(output)
    with torch.inference_mode():
        logprobs = torch.log_softmax(reference(torch.tensor([ids])).logits[0].float(), dim=1)
    assert output.prompt_logprobs[0] is None
    reported = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    assert len(reported) == len(ids) - 1
    for position, entries in enumerate(reported):
        row = logprobs[position]
        assert next(iter(entries)) == ids[position + 1]
        assert set(row.topk(2).indices.tolist()) <= set(entries)
        for token_id, entry in entries.items():
            assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-3)
            assert entry.rank == 1 + int((row > row[token_id]).sum())
            assert entry.decoded_token == llm.tokenizer.token_to_text(token_id)


def test_prompt_log_probabilities_do_not_depend_on_cache_or_chunks(directory):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, n=2)
    seen = []
    for chunk in (64, 7):
        with make_llm(directory, max_num_batched_tokens=chunk) as llm:
            for _ in range(2):
                (output,) = llm.generate([prompt(30)], params)
                seen.append([{k: e.rank for k, e in entries.items()} for entries in output.prompt_logprobs[1:]])
    assert all(ranks == seen[0] for ranks in seen)
    assert len(seen[0]) == 29


# ---- ends


def test_end_of_sequence_ends_the_output_silently_and_min_tokens_puts_it_off(llm):
    params = {"temperature": 0, "repetition_penalty": 1e4, "max_tokens": 30}
    biased = [EOS_TOKEN_ID] * 3 + prompt(5)
    (free,) = llm.generate([biased], SamplingParams(**params, ignore_eos=True, stop_token_ids=[]))
    stop_id = tokens(free)[4]
    (stopped,) = llm.generate([biased], SamplingParams(**params, ignore_eos=True, stop_token_ids=[stop_id]))
    assert tokens(stopped) == tokens(free)[:5]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop_id)
    assert stopped.outputs[0].text == llm.tokenizer.decode(tokens(free)[:4])
    (later,) = llm.generate([biased], SamplingParams(**params, ignore_eos=True, stop_token_ids=[stop_id], min_tokens=8))
    assert stop_id not in tokens(later)[:8]
    assert len(tokens(later)) > 7


def test_a_stop_string_ends_the_output_and_is_no_part_of_it(llm):
    (free,) = llm.generate([prompt(9)], GREEDY)
    text = free.outputs[0].text
    stop = text[6:8]
    (stopped,) = llm.generate([prompt(9)], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=stop))
    completion = stopped.outputs[0]
    assert completion.text == text[: text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert tokens(stopped) == tokens(free)[: len(tokens(stopped))]
    assert llm.stats().num_running == 0


def test_streamed_text_is_the_text(llm):
    (whole,) = llm.generate([prompt(9)], GREEDY)
    texts = [output.outputs[0].text for output in llm.stream(prompt(9), GREEDY)]
    assert texts[-1] == whole.outputs[0].text == llm.tokenizer.decode(tokens(whole))
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))


def test_one_of_three_completions_may_end_early(llm):  # case 116
    params = {**RANDOM, "n": 3, "seed": 5}
    (free,) = llm.generate([prompt(9)], SamplingParams(**params))
    stop_id = next(t for t in tokens(free, 1) if t not in tokens(free, 0) and t not in tokens(free, 2))
    (output,) = llm.generate([prompt(9)], SamplingParams(**params, stop_token_ids=[stop_id]))
    assert [completion.finish_reason for completion in output.outputs] == ["length", "stop", "length"]
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert tokens(output, 0) == tokens(free, 0)


def test_closing_a_stream_aborts_all_completions_and_frees_their_pages(llm):  # case 116
    stream = llm.stream(prompt(9), SamplingParams(**{**RANDOM, "max_tokens": 100}, n=3))
    for _ in range(5):
        output = next(stream)
    stats = llm.stats()
    assert (stats.num_running, sum(stats.cache.referenced_pages) > 0) == (3, True)
    stream.close()
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, sum(stats.cache.referenced_pages)) == (0, 0, 0)
    assert [completion.finish_reason for completion in output.outputs] == ["abort"] * 3
    assert tokens(llm.generate([prompt(9)], GREEDY)[0])


def test_salts_keep_equal_prompts_apart(directory, expected):
    with make_llm(directory) as llm:
        hits = [llm.generate([prompt(17)], GREEDY, cache_salt=salt)[0] for salt in ("", "a", "a", "b")]
    assert [output.num_cached_tokens for output in hits] == [0, 0, 16, 0]
    assert [tokens(output) for output in hits] == [expected(prompt(17))] * 4


def test_priorities_decide_the_order(directory):
    with make_llm(directory, scheduling_policy="priority", max_num_seqs=1) as llm:
        finished = []
        progress = lambda done, total: finished.append((done, total))  # noqa: E731
        outputs = llm.generate([prompt(5, s) for s in range(3)], GREEDY, priorities=[2, 0, 1], progress=progress)
    assert finished == [(1, 3), (2, 3), (3, 3)]
    assert all(tokens(output) for output in outputs)


def test_texts_and_chats(llm):
    (output,) = llm.generate("the quick brown fox", GREEDY)
    assert output.prompt == "the quick brown fox"
    assert output.prompt_token_ids == llm.tokenizer.encode("the quick brown fox")
    (answer,) = llm.chat([{"role": "user", "content": "the dog"}], GREEDY)
    assert answer.prompt == "<bos>user: the dog<eos>\n<bos>assistant: "
    assert answer.prompt_token_ids == llm.tokenizer.encode(answer.prompt, add_special_tokens=False)
    two = llm.chat([[{"role": "user", "content": text}] for text in ("a", "b")], GREEDY)
    assert ["user: a" in two[0].prompt, "user: b" in two[1].prompt] == [True, True]


def test_auto_length_is_solved_and_a_request_of_that_length_completes(directory):
    with make_llm(directory) as llm:
        config = llm.kv_cache_configs[0]
        memory = config.slab_bytes * 30 + config.null_page_bytes
    with make_llm(directory, kv_cache_memory=memory) as llm:
        limit = llm.max_model_len
        assert limit == llm.kv_cache_configs[0].max_model_len < 512
        (output,) = llm.generate([prompt(limit - 1)], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
        assert (len(tokens(output)), output.outputs[0].finish_reason) == (1, "length")
        (output,) = llm.generate([prompt(5)], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
        assert len(tokens(output)) == limit - 5
