"""`LLM`: its keywords, what it refuses before anything runs, and that it goes on afterwards."""

import dataclasses
import threading

import numpy as np
import pytest
import torch
from tiny_models import VOCAB_SIZE, tiny_llama

from girih import LLM, RequestOutput, SamplingParams
from girih.config import EngineConfig
from girih.engine.llm import make_config
from girih.errors import CapacityError, CheckpointError, ConfigError, ExecutorError, RequestError

PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    directory = tiny_llama(tmp_path_factory.mktemp("model"), chat_template=None)
    with LLM(str(directory), kv_cache_memory="1MiB", block_size=4, max_model_len=64, check_invariants=True) as llm:
        yield llm
    torch.set_num_threads(threads)


def test_keywords_are_the_fields_of_engine_config():
    options = {field.name: field.default for field in dataclasses.fields(EngineConfig) if field.name != "model"}
    assert make_config("m", None, options) == EngineConfig(model="m")
    assert make_config("m", None, {"max_num_seqs": 3}).max_num_seqs == 3


def test_the_cache_s_size_may_be_written_with_a_unit():
    assert make_config("m", "1GiB", {}).kv_cache_memory_bytes == 1 << 30
    assert make_config("m", 4096, {}).kv_cache_memory_bytes == 4096
    assert make_config("m", np.int64(4096), {}).kv_cache_memory_bytes == 4096
    with pytest.raises(ConfigError, match="not both"):
        make_config("m", 4096, {"kv_cache_memory_bytes": 4096})


@pytest.mark.parametrize("size", [1e9, float("nan"), True, b"1GiB", ["1GiB"], "", "x", "1.2.3GiB", 0, -1, 1 << 70])
def test_what_is_no_size_is_refused_as_such(llm, size):
    with pytest.raises(ConfigError, match="size"):
        make_config("m", size, {})
    with pytest.raises(ConfigError, match="size"):
        llm.resize_kv_cache(size)


@pytest.mark.parametrize("prompts", [["a", "b"], [[5], [6]], [[5], "b", [6]]])
def test_a_stream_of_several_prompts_is_refused(llm, prompts):
    with pytest.raises(RequestError, match=f"one prompt, not {len(prompts)}"):
        next(llm.stream(prompts, PARAMS))


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e10, "5", None])
def test_a_time_limit_that_no_clock_has_is_refused(seconds):
    with pytest.raises(ConfigError, match=r"step_timeout_s=.* at most 604800 \(a week\)"):
        LLM("m", step_timeout_s=seconds)


def test_a_stream_ends_with_an_error_when_the_engine_is_shut_down(tmp_path):
    with LLM(str(tiny_llama(tmp_path)), max_model_len=64, kv_cache_memory="1MiB") as llm:
        stream = llm.stream([5, 6], SamplingParams(max_tokens=50, ignore_eos=True))
        next(stream)
        llm.shutdown()
        *_, last = stream
        assert last.error == "it was shut down"


def test_an_unknown_keyword_is_refused_with_the_one_that_was_meant():
    with pytest.raises(ConfigError, match="'max_modl_len'; did you mean max_model_len"):
        LLM("m", max_modl_len=5)
    with pytest.raises(ConfigError, match=r"'zzz'; known: .*max_num_seqs"):
        LLM("m", zzz=5)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["ok", ""], "prompt 1: the prompt is empty"),
        ([[5], []], "prompt 1: the prompt is empty"),
        ([[]], "prompt 0: the prompt is empty"),
        ([], "no prompt"),
        ([[5], [5, VOCAB_SIZE]], rf"prompt 1: prompt token id {VOCAB_SIZE}"),
        ([[5], [5] * 64], r"prompt 1: a prompt of 64 tokens .* 64 tokens"),
        ([[5], [5] * 1000], r"prompt 1: a prompt of 1000 tokens .* 64 tokens"),
    ],
)
def test_a_bad_prompt_is_refused_by_index_before_anything_runs(llm, prompts, message):  # case 108
    steps = llm.stats().num_steps
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, PARAMS)
    stats = llm.stats()
    assert (stats.num_steps, stats.num_running, stats.num_waiting) == (steps, 0, 0)
    (output,) = llm.generate([[5, 6]], PARAMS)
    assert len(output.outputs[0].token_ids) == 3


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, -1, 2**40])
def test_a_stop_id_outside_the_vocabulary_is_refused(llm, token_id):  # case 111
    with pytest.raises(RequestError, match=f"stop_token_ids: {token_id}"):
        llm.generate([[5]], SamplingParams(stop_token_ids=[token_id], min_tokens=1))


@pytest.mark.parametrize(("length", "max_tokens", "num_output"), [(62, None, 2), (63, 1, 1), (63, 2, 1), (62, 1, 1)])
def test_max_tokens_is_cut_to_the_longest_request(llm, length, max_tokens, num_output):  # case 109
    (output,) = llm.generate([[5] * length], SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == num_output
    assert output.outputs[0].finish_reason == "length"


def test_parameters_may_be_one_for_all_or_one_each(llm):
    each = [dataclasses.replace(PARAMS, max_tokens=n) for n in (1, 2)]
    outputs = llm.generate([[5], [6]], each)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2]
    with pytest.raises(RequestError, match="got 2 for 3 prompts"):
        llm.generate([[5], [6], [7]], each)
    with pytest.raises(RequestError, match="priorities: got 1 for 2"):
        llm.generate([[5], [6]], PARAMS, priorities=[1])


def test_request_ids_are_the_engine_s_own_and_never_used_twice(llm):
    outputs = [output for _ in range(2) for output in llm.generate([[5], [5]], PARAMS)]
    assert len({output.request_id for output in outputs}) == 4
    assert all(isinstance(output, RequestOutput) and output.finished for output in outputs)


def test_a_model_without_a_chat_template_is_refused_unless_one_is_given(llm):
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(ConfigError, match="--chat-template"):
        llm.chat(messages)
    (output,) = llm.chat(messages, PARAMS, chat_template="{{ messages[0].content }}!")
    assert output.prompt == "hi!"
    for nothing in ([], [[]]):
        with pytest.raises(RequestError, match="no message"):
            llm.chat(nothing, PARAMS)


def test_two_streams_and_a_batch_may_be_interleaved(llm):
    alone = [llm.generate([[5, i]], PARAMS)[0].outputs[0].token_ids for i in (5, 6, 7)]
    first, second = llm.stream([5, 5], PARAMS), llm.stream([5, 6], PARAMS)
    one, two = next(first), next(second)
    (batch,) = llm.generate([[5, 7]], PARAMS)
    for stream in (first, second):
        list(stream)
    assert [output.outputs[0].token_ids for output in (one, two, batch)] == alone


def test_a_stream_that_another_call_s_steps_have_ended_still_yields_its_end(llm):
    stream = llm.stream([5, 5], PARAMS)
    next(stream)
    llm.generate([[6]], dataclasses.replace(PARAMS, max_tokens=9))
    (last,) = stream
    assert (last.finished, last.outputs[0].finish_reason) == (True, "length")


def test_prompts_may_be_arrays(llm):
    expected = [output.outputs[0].token_ids for output in llm.generate([[5, 6], [7]], PARAMS)]
    for make in (np.array, torch.tensor):
        outputs = llm.generate([make([5, 6]), make([7])], PARAMS)
        assert [output.outputs[0].token_ids for output in outputs] == expected


def test_a_request_without_numbers_fails_alone(llm, monkeypatch):
    prompts, params = [[5, 5], [5, 6], [5, 7]], dataclasses.replace(PARAMS, logprobs=1)
    alone = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    model = llm.core.executor._worker.runner.model
    compute = model.compute_logits

    def damaged(hidden):
        logits = compute(hidden)
        if len(logits) == 3:
            logits[1, 9] = torch.nan
        return logits

    monkeypatch.setattr(model, "compute_logits", damaged)
    outputs = llm.generate(prompts, params)
    assert [output.error is None for output in outputs] == [True, False, True]
    assert "no token can be chosen for this request" in outputs[1].error
    assert (outputs[1].outputs[0].token_ids, outputs[1].outputs[0].finish_reason) == ([], "error")
    assert [outputs[i].outputs[0].token_ids for i in (0, 2)] == [alone[0], alone[2]]
    assert llm.stats().num_running == 0


def test_a_failing_model_gives_an_error_per_request_and_the_engine_goes_on(llm, monkeypatch):
    runner = llm.core.executor._worker.runner

    def broken(step):
        raise ValueError("a wire came off")

    monkeypatch.setattr(runner, "execute_model", broken)
    outputs = llm.generate([[5], [6]], PARAMS)
    assert all("rank 0 failed in execute_model: ValueError: a wire came off" in output.error for output in outputs)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "error"]
    monkeypatch.undo()
    assert llm.generate([[5]], PARAMS)[0].error is None


def test_the_cache_shrinks_and_grows_between_calls(llm):
    prompts = [[5 + i] * 40 for i in range(4)]
    before = [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS)]
    (whole,) = llm.resize_kv_cache("1MiB")
    assert whole == llm.kv_cache_configs[0].total_bytes
    (half,) = llm.resize_kv_cache(whole // 2)
    assert 0.4 * whole < half <= whole // 2
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS)] == before
    with pytest.raises(CapacityError, match="KV cache of 16 B holds requests of up to 0 tokens"):
        llm.resize_kv_cache(16)
    with pytest.raises(ConfigError, match="size"):
        llm.resize_kv_cache("much")
    assert llm.resize_kv_cache(2 * whole) == [whole]
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS)] == before


def test_after_shutdown_nothing_is_taken(tmp_path):
    llm = LLM(str(tiny_llama(tmp_path)), kv_cache_memory="1MiB")
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(ExecutorError, match="shut down"):
        llm.generate([[5]], PARAMS)


def test_a_damaged_tokenizer_is_refused_before_anything_is_loaded(tmp_path):
    directory = tiny_llama(tmp_path)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").unlink()  # never looked for
    threads = threading.enumerate()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be used"):
        LLM(str(directory), kv_cache_memory="1MiB")
    assert threading.enumerate() == threads


def test_finding_the_model_and_loading_its_tokenizer_are_timed(llm):
    assert list(llm.startup_report.phases_s)[:3] == ["find model", "load tokenizer", "plan from config.json"]


def test_several_threads_get_what_they_get_alone(llm):
    prompts = [[[7 + i, 8, 9], [20 + i] * 9] for i in range(4)]
    alone = [[output.outputs[0].token_ids for output in llm.generate(pair, PARAMS)] for pair in prompts]
    together: dict[int, list[list[int]]] = {}

    def run(i: int) -> None:
        together[i] = [output.outputs[0].token_ids for output in llm.generate(prompts[i], PARAMS)]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[i] for i in range(4)] == alone


@pytest.mark.parametrize(
    "options",
    [
        {"sampling_params": {"temperature": 0}},
        {"sampling_params": [PARAMS, None]},
        {"sampling_params": []},
        {"priorities": ["x", 1]},
        {"priorities": [None, 2]},
        {"cache_salt": None},
        {"cache_salt": "\udc80"},
    ],
)
def test_arguments_of_a_wrong_type_are_refused_and_leave_nothing_behind(llm, options):
    with pytest.raises(RequestError, match=next(iter(options))):
        llm.generate([[5], [6]], **options)
    assert not llm.core.has_unfinished()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(stop_token_ids=range(VOCAB_SIZE), min_tokens=2, max_tokens=5),
        SamplingParams(stop_token_ids=range(VOCAB_SIZE), min_tokens=2, max_tokens=5, temperature=0),
    ],
)
def test_a_request_that_no_token_can_serve_ends_alone(llm, params):
    plain, odd = llm.generate([[5, 6, 7], [5, 6, 8]], [PARAMS, params])
    assert len(plain.outputs[0].token_ids) == 3
    assert plain.error is None
    assert "no token can be chosen" in odd.error


def test_an_extreme_penalty_still_samples_a_token_of_the_vocabulary(llm):
    params = SamplingParams(repetition_penalty=1e-40, presence_penalty=-1e4, max_tokens=5, ignore_eos=True)
    plain, odd = llm.generate([[5, 6, 7], [5, 6, 8]], [PARAMS, params])
    assert plain.error is None
    assert odd.error is None
    assert all(0 <= token_id < VOCAB_SIZE for token_id in odd.outputs[0].token_ids)
