"""Models in worker processes: the same tokens as in this process, and an engine that tells of a dead worker."""

import os
import signal
import time

import pytest
import toy_recurrent
from prompts import TEXTS, prompt_ids
from tiny_models import tiny_llama
from toy_recurrent.checkpoint import save
from toy_worker import is_running

from girih import LLM, SamplingParams
from girih.errors import ExecutorError

GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=2, prompt_logprobs=1, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=8, ignore_eos=True)


def generated(directory, executor):
    """Return the tokens of prompts that are given twice, and how many tokens of each prompt were cached."""
    options = {"dtype": "float32", "max_model_len": 200, "kv_cache_memory": "32MiB", "max_num_batched_tokens": 64}
    with LLM(directory, executor=executor, check_invariants=True, **options) as llm:
        encode = llm.tokenizer.encode
        prompts = [prompt_ids(encode, language, length) for language in TEXTS for length in (1, 90)]
        params = [GREEDY, SAMPLED, GREEDY] * 2
        outputs = [*llm.generate(prompts, params), *llm.generate(prompts, params)]
        return [(output.outputs[0].token_ids, output.num_cached_tokens, output.error) for output in outputs]


@pytest.mark.soak
@pytest.mark.real_weights
@pytest.mark.xdist_group("smollm2")
def test_a_worker_process_gives_the_tokens_of_this_process_with_a_real_model(real_model) -> None:
    check_worker_process(str(real_model("smollm2")))


def test_a_worker_process_gives_the_tokens_of_this_process(tmp_path) -> None:
    check_worker_process(str(tiny_llama(tmp_path)))


def check_worker_process(directory):
    expected = generated(directory, "uniproc")
    assert generated(directory, "multiproc") == expected
    assert any(num_cached for _, num_cached, _ in expected)


def test_models_that_the_program_adds_are_found_by_its_workers(tmp_path) -> None:
    prompts = [[5, 6, 7], list(range(3, 40))]
    tokens = []
    with toy_recurrent.installed():
        directory = str(save(tmp_path))
        for executor in ("uniproc", "multiproc"):
            with LLM(directory, max_model_len=64, kv_cache_memory="8MiB", executor=executor) as llm:
                outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
                tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("parallel", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_when_a_worker_is_killed_every_request_is_told_and_the_engine_takes_no_more(tmp_path, parallel) -> None:
    directory = str(tiny_llama(tmp_path, max_position_embeddings=4096))
    options = {"max_model_len": 4000, "kv_cache_memory": "8MiB", "executor": "multiproc"} | parallel
    with LLM(directory, **options) as llm:
        processes = llm.core.executor._processes
        killed_at = []

        def kill(num_finished, _):
            if not killed_at:
                killed_at.append(time.monotonic())
                os.kill(processes[-1].pid, signal.SIGKILL)

        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (4, 3000, 3000)]
        outputs = llm.generate(["one", "two", "three"], params, progress=kill)
        assert time.monotonic() - killed_at[0] < 5
        assert outputs[0].error is None
        for output in outputs[1:]:
            assert f"the worker of rank {len(processes) - 1} was killed by SIGKILL" in output.error
        with pytest.raises(ExecutorError, match=r"takes no more requests: .*killed by SIGKILL"):
            llm.generate("four")
    assert not any(is_running(process.pid) for process in processes)
