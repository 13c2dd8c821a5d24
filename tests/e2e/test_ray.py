"""Models on the actors of a Ray cluster of two nodes: the same tokens as in this process."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import toy_recurrent
from least_memory import least_memory
from tiny_models import tiny_gemma3, tiny_llama
from toy_recurrent.checkpoint import save
from toy_worker import is_running

from girih import LLM, SamplingParams
from girih.config import EngineConfig
from girih.errors import ConfigError, ExecutorError

pytestmark = pytest.mark.xdist_group("ray")

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PREFIX = [(13 * i * i + 5 * i) % 300 + 3 for i in range(40)]
PROMPTS = [PREFIX[:5], PREFIX, [*PREFIX[:32], 7, 8, 9], PREFIX[3:20], [*PREFIX, 99], [11]]
# name -> how it is made, and an uneven split of its layers
MODELS = {
    "llama": (tiny_llama, {"num_hidden_layers": 5}, (1, 4)),
    "gemma3": (
        tiny_gemma3,
        {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2},
        (4, 2),
    ),
}
PARALLEL = {
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "tp2xpp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "uneven": {"pipeline_parallel_size": 2},
}


def generated(directory, prompts=PROMPTS, params=GREEDY, **options):
    """Return the tokens of prompts that are given twice, and the engine's counts."""
    options = {"max_model_len": 128, "kv_cache_memory": "1MiB", "max_num_batched_tokens": 24} | options  # chunks
    with LLM(str(directory), dtype="float32", max_num_seqs=6, check_invariants=True, **options) as llm:
        outputs = [*llm.generate(prompts, params), *llm.generate(prompts, params)]
        assert {output.error for output in outputs} == {None}
        return [output.outputs[0].token_ids for output in outputs], llm.stats()


def test_two_ranks_of_two_stages_on_two_nodes_give_the_tokens_of_this_process(ray_cluster, tmp_path):
    directory = tiny_llama(tmp_path, num_hidden_layers=5)
    tokens, stats = generated(directory, executor="ray", **PARALLEL["tp2xpp2"])
    assert tokens == generated(directory)[0]
    assert stats.cache.tokens_hit > 0


@pytest.mark.soak
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("parallel", PARALLEL)
def test_tokens_are_those_of_this_process_under_any_split_and_preemption(ray_cluster, tmp_path, name, parallel):
    build, overrides, split = MODELS[name]
    directory = build(tmp_path, **overrides)
    options = PARALLEL[parallel] | ({"pipeline_split": split} if parallel == "uneven" else {})
    tokens, stats = generated(directory, executor="ray", **options)
    assert tokens == generated(directory)[0]
    assert stats.cache.tokens_hit > 0
    prompts, long = [PREFIX[:5], [11], PREFIX[3:20], PREFIX[7:16]], dataclasses.replace(GREEDY, max_tokens=40)
    expected = generated(directory, prompts, long)[0]
    config = EngineConfig(model=str(directory), executor="ray", dtype="float32", max_model_len=64, **options)
    scarce = {"max_model_len": 64, "kv_cache_memory": least_memory(config) * 3 // 2}
    tokens, stats = generated(directory, prompts, long, executor="ray", **options, **scarce)
    assert tokens == expected
    assert stats.num_preemptions > 0


def test_models_that_the_program_adds_are_found_by_its_actors(ray_cluster, tmp_path):
    tokens = []
    with toy_recurrent.installed():
        directory = str(save(tmp_path))
        for executor in ("uniproc", "ray"):
            with LLM(directory, max_model_len=64, kv_cache_memory="8MiB", executor=executor) as llm:
                outputs = llm.generate([[5, 6, 7], list(range(3, 40))], GREEDY)
                tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[0] == tokens[1]


def test_when_an_actor_is_killed_every_request_is_told_and_the_engine_takes_no_more(ray_cluster, tmp_path):
    directory = str(tiny_llama(tmp_path, max_position_embeddings=4096))
    options = {"max_model_len": 4000, "kv_cache_memory": "8MiB", "tensor_parallel_size": 2}
    with LLM(directory, executor="ray", **options) as llm:
        pids = [other.pid for other in llm.core.executor._workers._introductions]
        killed_at = []

        def kill(num_finished, _):
            if not killed_at:
                killed_at.append(time.monotonic())
                os.kill(pids[-1], signal.SIGKILL)

        params = [dataclasses.replace(GREEDY, max_tokens=n) for n in (4, 3000, 3000)]
        outputs = llm.generate(["one", "two", "three"], params, progress=kill)
        assert time.monotonic() - killed_at[0] < 10
        assert outputs[0].error is None
        for output in outputs[1:]:
            assert "the worker of rank 1 " in output.error
        with pytest.raises(ExecutorError, match=r"takes no more requests: .*the worker of rank 1 .* has ended"):
            llm.generate("four")
    assert not any(map(is_running, pids))


@pytest.mark.soak
@pytest.mark.parametrize("number", range(3))
def test_kill_9_of_a_random_actor_under_load_loses_no_request(ray_cluster, tmp_path, number):
    rng = random.Random(number)
    directory = str(tiny_llama(tmp_path))
    options = {"max_model_len": 128, "kv_cache_memory": "1MiB", "dtype": "float32"}
    prompts = [PREFIX[i % 7 : 8 + i] for i in range(32)]
    params = [dataclasses.replace(GREEDY, max_tokens=20 + i) for i in range(32)]
    with LLM(directory, **options) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    with LLM(directory, executor="ray", tensor_parallel_size=2, restart_workers=True, **options) as llm:
        victim = rng.choice(llm.core.executor._workers._introductions).pid
        timer = threading.Timer(rng.uniform(0.01, 0.6), os.kill, (victim, signal.SIGKILL))
        timer.start()
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected
        timer.join()
        assert [output.outputs[0].token_ids for output in llm.generate(prompts[:2], params[:2])] == expected[:2]
        assert llm.stats().num_restarts == 1


def test_sizes_that_the_model_does_not_take_are_refused_before_ray_is_asked(tmp_path):
    with pytest.raises(ConfigError, match="tensor-parallel ranks"):
        LLM(str(tiny_llama(tmp_path)), executor="ray", tensor_parallel_size=3)


def test_the_command_prints_its_answer_and_nothing_else(ray_cluster, tmp_path):
    directory = str(tiny_llama(tmp_path))
    command = ["generate", "--model", directory, "--executor", "ray", "--json", "--max-tokens", "3", "one"]
    run = subprocess.run(
        [sys.executable, "-m", "girih.cli.main", *command, "--kv-cache-memory", "1MiB", "--max-model-len", "64"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "RAY_ADDRESS": ray_cluster.address},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert len(json.loads(run.stdout)["outputs"][0]["outputs"][0]["token_ids"]) <= 3
    said = run.stderr.splitlines()
    assert said[0].startswith("loading ")
    assert len(said) <= 4, run.stderr
