"""A server over several workers: the same answers, and none lost when a worker dies."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from server_process import ServerProcess, children, poll
from tiny_models import tiny_llama
from toy_worker import is_running

from girih import LLM, SamplingParams

PROMPTS = [[(7 * i * i + 5 * i + k) % 300 + 3 for i in range(20 + k)] for k in range(6)]
TWO_STAGES = ("--pipeline-parallel-size", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"))


def offline(model, num_tokens):
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    with LLM(str(model), dtype="float32", kv_cache_memory="2MiB") as llm:
        return [output.outputs[0].text for output in llm.generate(PROMPTS, params)]


def complete(server, prompt, num_tokens):
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def complete_all(server, num_tokens):
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        return list(threads.map(lambda prompt: complete(server, prompt, num_tokens), PROMPTS))


@pytest.mark.xdist_group("server-workers")
def test_two_processes_answer_as_one_and_a_new_one_goes_on_for_one_that_dies(model, tmp_path):
    options = ("--executor", "multiproc", *TWO_STAGES, "--restart-workers")
    with ServerProcess(model, *options, folder=tmp_path, is_calm=False) as server:
        assert complete_all(server, 12) == offline(model, 12)
        workers = children(server.engine_pid)
        assert len(workers) == 2
        with ThreadPoolExecutor(1) as threads:
            answers = threads.submit(complete_all, server, 300)
            poll(lambda: server.metric("vllm:num_requests_running") > 0)
            os.kill(workers[1], signal.SIGKILL)
            assert answers.result() == offline(model, 300)
        poll(lambda: server.metric("girih:worker_restarts_total") == 1)
    assert not any(map(is_running, workers))


@pytest.mark.xdist_group("ray")
def test_actors_of_a_cluster_answer_as_one_process(ray_cluster, model, tmp_path):
    environment = {"RAY_ADDRESS": ray_cluster.address}
    options = ("--executor", "ray", *TWO_STAGES)
    with ServerProcess(model, *options, folder=tmp_path, environment=environment) as server:
        assert complete_all(server, 12) == offline(model, 12)
