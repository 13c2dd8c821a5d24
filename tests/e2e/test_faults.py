"""Worker processes that die, hang, raise or run out of memory: told with rank and reason, or replaced and forgotten."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from faulty_worker import Fault, MakeFaultyWorker
from tiny_models import tiny_llama
from toy_worker import is_running, named_memory

from girih import LLM, SamplingParams
from girih.errors import ExecutorError, GirihError
from girih.executor import _remote, multiproc

OPTIONS = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory": "1MiB", "max_num_batched_tokens": 48}
PARALLEL = {"executor": "multiproc", "tensor_parallel_size": 2}
PROMPTS = [[(7 * i + 3 * j) % 300 + 3 for j in range(1 + 5 * i % 60)] for i in range(32)]
PARAMS = [SamplingParams(temperature=0, max_tokens=20 + i, ignore_eos=True) for i in range(32)]

TEXT = {
    "raise": "worker of rank 1 failed in {method}: ValueError: no luck in {method}",
    "kill": "the worker of rank 1 was killed by SIGKILL",
    "stop": r"rank 0: {method} did not return within 1 s; stopped by a signal: worker of rank 1",
    "memory": "rank 1.*(allocate|MemoryError|unavailable)",
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return str(tiny_llama(tmp_path_factory.mktemp("model"), num_hidden_layers=3))


def in_soak(*values):
    """Mark a case whose kin is in every test run already: each start of workers takes seconds."""
    return pytest.param(*values, marks=pytest.mark.soak)


def tokens_of(outputs):
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(directory):
    with LLM(directory, **OPTIONS) as llm:
        return tokens_of(llm.generate(PROMPTS, PARAMS))


@pytest.fixture
def launched(monkeypatch):
    """Return the processes that are launched; in the end all have ended."""
    processes, make_process = [], multiproc.WorkerProcess

    def launch(*args, **options):
        processes.append(make_process(*args, **options))
        return processes[-1]

    monkeypatch.setattr(multiproc, "WorkerProcess", launch)
    yield processes
    assert processes
    assert not any(is_running(process.pid) for process in processes)


@pytest.fixture
def meet(monkeypatch, launched):
    """Let the workers meet a fault."""
    return lambda fault: monkeypatch.setattr(_remote, "MakeWorker", lambda config: MakeFaultyWorker(config, fault))


@pytest.mark.parametrize("how", ["raise", in_soak("kill"), in_soak("stop"), in_soak("memory")])
def test_requests_in_the_middle_are_computed_again_by_new_workers(directory, expected, meet, tmp_path, how):
    meet(Fault(how, "execute_model", tmp_path / "mark", call=8))
    with LLM(directory, **OPTIONS, **PARALLEL, restart_workers=True, step_timeout_s=5) as llm:
        assert tokens_of(llm.generate(PROMPTS, PARAMS)) == expected
        assert llm.stats().num_restarts == 1


@pytest.mark.parametrize("how", [in_soak("raise"), "stop", in_soak("memory")])
def test_without_new_workers_every_request_is_told_rank_and_reason_in_time(directory, meet, tmp_path, how):
    mark = tmp_path / "mark"
    meet(Fault(how, "execute_model", mark, call=8))
    with LLM(directory, **OPTIONS, **PARALLEL, step_timeout_s=1) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        assert time.time() - mark.stat().st_mtime < 5
        for output in outputs:
            with pytest.raises(ExecutorError, match=TEXT[how].format(method="execute_model")):
                raise ExecutorError(output.error)
        with pytest.raises(ExecutorError, match="takes no more requests"):
            llm.generate("x")


@pytest.mark.parametrize(
    ("method", "how"),
    [
        ("load_model", "kill"),
        ("initialize_from_config", "memory"),
        in_soak("initialize_from_config", "raise"),  # case 98
        *(in_soak("load_model", how) for how in ("raise", "memory")),
        in_soak("initialize_from_config", "kill"),
    ],
)
def test_a_failure_on_the_way_up_names_rank_and_reason(directory, meet, tmp_path, method, how):
    mark = tmp_path / "mark"
    meet(Fault(how, method, mark))
    with pytest.raises(GirihError, match=TEXT[how].format(method=method)):
        LLM(directory, **{**OPTIONS, "kv_cache_memory": "64MiB"}, **PARALLEL)
    assert time.time() - mark.stat().st_mtime < 5


@pytest.mark.soak
def test_new_workers_that_fail_too_end_every_request_with_both_reasons(directory, meet, tmp_path, monkeypatch):
    meet(Fault("raise", "execute_model", tmp_path / "mark", call=3))
    with LLM(directory, **OPTIONS, **PARALLEL, restart_workers=True) as llm:
        llm.core.executor._make_worker = MakeFaultyWorker(
            llm.core.config, Fault("raise", "load_model", tmp_path / "other")
        )
        (error,) = {output.error for output in llm.generate(PROMPTS, PARAMS)}
    assert re.search("rank 1 failed in execute_model: ValueError: no luck in execute_model.*; and new workers", error)
    assert re.search(
        "could not be started: worker of rank 1 failed in load_model: ValueError: no luck in load_m", error
    )


@pytest.mark.soak
def test_a_request_that_kills_every_worker_ends_and_the_engine_lives(directory, expected, meet, tmp_path):
    meet(Fault("raise", "execute_model", tmp_path / "mark", call=1, always=True))
    with LLM(directory, **OPTIONS, **PARALLEL, restart_workers=True) as llm:
        (output,) = llm.generate([PROMPTS[3]], PARAMS[3])
        assert "no luck in execute_model (the last of 3 failures since its last token)" in output.error
        assert llm.stats().num_restarts == 3


def rounds(count):
    """Give the numbers of kill rounds: the first one is for every test run, the others for the soak."""
    return [0, *map(in_soak, range(1, count))]


LAYOUTS = [(2, 1), (1, 2), (2, 2), (1, 3)]


@pytest.mark.parametrize("number", rounds(20))
def test_kill_9_of_a_random_worker_under_load_loses_no_request(directory, expected, launched, number):
    rng = random.Random(number)
    tensor, stages = LAYOUTS[number % len(LAYOUTS)]
    parallel = {"executor": "multiproc", "tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
    with LLM(directory, **OPTIONS, **parallel, restart_workers=True) as llm:
        victim = rng.choice(launched)
        assert not named_memory(victim.pid)
        timer = threading.Timer(rng.uniform(0.01, 0.6), os.kill, (victim.pid, signal.SIGKILL))
        timer.start()
        assert tokens_of(llm.generate(PROMPTS, PARAMS)) == expected
        timer.join()
        assert tokens_of(llm.generate(PROMPTS[:2], PARAMS[:2])) == expected[:2]  # if it was killed after the last step
        assert llm.stats().num_restarts == 1


def all_children(pid):
    """Return the processes that any thread of a process has started."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


@pytest.mark.parametrize("number", rounds(20))
def test_kill_9_of_a_random_worker_ends_the_command_in_time_and_not_with_0(directory, number):
    rng = random.Random(number)
    tensor, stages = LAYOUTS[number % len(LAYOUTS)]
    command = [
        *(sys.executable, "-m", "girih.cli.main", "generate", "--model", directory, "--max-tokens", "4000", "--json"),
        *("--executor", "multiproc", "--tensor-parallel-size", str(tensor), "--pipeline-parallel-size", str(stages)),
        *("--kv-cache-memory", "64MiB", "--ignore-eos", *(f"prompt {i}" for i in range(32))),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if "KV cache:" in line:
            break
    time.sleep(rng.uniform(0.0, 1.0))
    workers = all_children(process.pid)
    assert len(workers) == tensor * stages
    rank = rng.randrange(len(workers))
    os.kill(sorted(workers)[rank], signal.SIGKILL)
    start = time.monotonic()
    output, errors = process.communicate(timeout=30)
    assert time.monotonic() - start < 5
    assert process.returncode == 2
    last_words = f"girih: the workers cannot be used: the worker of rank {rank} was killed by SIGKILL"
    assert errors.splitlines()[-1].startswith(last_words)
    told = json.loads(output)["outputs"]
    assert len(told) == 32
    assert all(f"the worker of rank {rank} was killed by SIGKILL" in request["error"] for request in told)
    assert not any(map(is_running, workers))
