"""Steps of few rows are recorded and replayed: to the bit what they are without, whatever changes from step to step."""

import threading

import numpy as np
import pytest
import torch

from girih.kernels.tape import Tape
from girih.layers.mlp import GatedMLP
from girih.layers.replay import MAX_ROWS
from girih.request import SamplingParams
from tests.step_driver import StepDriver, make_worker
from tests.tiny_models import tiny_gemma3, tiny_llama

PARAMS = SamplingParams(temperature=0, seed=0, logprobs=5)
FORMS = {
    "llama": (tiny_llama, {}),
    "gemma3": (tiny_gemma3, {}),
    "int8": (tiny_llama, {"quantization": "int8"}),
    "bfloat16": (tiny_llama, {"dtype": "bfloat16", "quantization": "int8"}),
    "int8-cache": (tiny_gemma3, {"kv_cache_dtype": "int8", "dtype": "bfloat16", "quantization": "int8"}),
}


@pytest.fixture
def played(monkeypatch):
    """Count how often a tape is played."""
    counts = []
    play = Tape.play
    monkeypatch.setattr(Tape, "play", lambda tape: (counts.append(tape), play(tape)))
    return counts


@pytest.fixture(params=[1, 3])
def threads(request, monkeypatch):
    """Let kernels run on so many threads, however little there is to do."""
    monkeypatch.setattr("girih.kernels.threads.THREAD_ELEMENTS", 64)
    monkeypatch.setattr("girih.linear._cpu_kernel.MIN_THREAD_PRODUCTS", 64)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def make(form, parent):
    model, options = FORMS[form]
    return make_worker(model(parent, hidden_size=64), max_num_seqs=MAX_ROWS + 1, **options)


def results(outputs):
    """Return all that steps have returned, token by token, with the bits of log probabilities."""
    return [
        (row, token, *(array.tobytes() for array in vars(output.logprobs[row]).values()))
        for output in outputs
        for row, token in zip(output.rows.tolist(), output.token_ids.tolist(), strict=True)
    ]


def eventful(worker):
    """Rows come and go, share pages that change place, and go beyond windows and pages; freed pages are NaN."""
    driver = StepDriver(worker, poison=True, max_model_len=1024, pool_bytes=8 << 20)
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 90, 700).tolist()
    driver.add(0, prompt[:45], PARAMS)
    driver.step({0: 45})
    for _ in range(6):
        driver.step({0: 1})
    driver.add(1, prompt, PARAMS)
    driver.step({0: 1, 1: 700})
    driver.step({0: 1, 1: 1})
    for row in (2, 3, 4):
        driver.add(row, [*prompt[:640], 5 + row], PARAMS, share_from=1, num_shared=640)
    driver.step({0: 1, 1: 1, 2: 1, 3: 1, 4: 1})
    driver.move(0, 5)
    for _ in range(5):
        driver.step({4: 1, 1: 1, 0: 1, 2: 1, 3: 1})
    driver.drop(1)
    driver.drop(3)
    for work in ({0: 1, 2: 1, 4: 1}, {4: 1}, {0: 1}, {0: 1, 2: 1, 4: 1}, {2: 1, 0: 1}, {2: 1, 4: 1}):
        driver.step(work)
        driver.step(work)
    return results(driver.outputs)


@pytest.mark.parametrize("form", FORMS)
def test_replayed_steps_are_those_computed_anew_to_the_bit(form, tmp_path, threads, played):
    worker = make(form, tmp_path)
    worker.runner.model.replayed.is_on = False
    expected = eventful(worker)
    assert not played
    worker.runner.model.replayed.is_on = True
    assert eventful(worker) == expected
    assert len(played) > 15
    assert len(set(played)) == 4, "one tape each for 1, 2, 3 and 5 rows"


def test_more_rows_than_are_worth_it_and_prompts_are_not_recorded(tmp_path, played):
    driver = StepDriver(make("llama", tmp_path))
    for row in range(MAX_ROWS + 1):
        driver.add(row, [row + 3, 7], PARAMS)
    for num_new in (2, 1, 1, 1):
        driver.step(dict.fromkeys(range(MAX_ROWS + 1), num_new))
    assert not played
    for _ in range(3):
        driver.step(dict.fromkeys(range(MAX_ROWS), 1))
    assert len(played) == 2


def test_a_new_pool_and_another_number_of_threads_are_recorded_anew(tmp_path, threads, played):
    worker = make("gemma3", tmp_path)
    for num_threads in (threads, 2):
        torch.set_num_threads(num_threads)
        for _ in range(2):
            driver = StepDriver(worker, poison=True)
            driver.add(0, [3, 4, 5], PARAMS)
            driver.run(0, 5)
    assert len(set(played)) == 4
    assert len(played) == 4 * 3


def test_a_model_in_which_torch_computes_runs_as_ever(tmp_path, monkeypatch, played):
    worker = make("llama", tmp_path)

    def run():
        driver = StepDriver(worker)
        driver.add(0, [3, 4, 5], PARAMS)
        driver.run(0, 6)
        return results(driver.outputs)

    expected = run()
    forward = GatedMLP.forward
    monkeypatch.setattr(GatedMLP, "forward", lambda mlp, x: forward(mlp, x).clone())
    played.clear()
    assert run() == expected
    assert not played


def test_the_reference_backend_runs_as_ever(tmp_path, played):
    worker = make_worker(tiny_llama(tmp_path, hidden_size=64), attention_backend="reference")
    driver = StepDriver(worker)
    driver.add(0, [3, 4, 5], PARAMS)
    driver.run(0, 5)
    assert not played


def test_all_recorded_steps_together_need_the_memory_of_the_largest(tmp_path):
    driver = StepDriver(make("llama", tmp_path))
    memory = driver.worker.runner.model.replayed._memory
    for row in range(MAX_ROWS):
        driver.add(row, [row + 3, 7], PARAMS)
    driver.step(dict.fromkeys(range(MAX_ROWS), 2))
    sizes = []
    for num_rows in (MAX_ROWS, 15, 7, 1):
        driver.step(dict.fromkeys(range(num_rows), 1))
        sizes.append(sum(block.size for block in memory._free))
    assert sizes[0] > sizes[-1] - 32768, "results are held apart"


def test_two_models_are_recorded_and_replayed_at_once(tmp_path):
    """As two engines of one process: each worker has a thread of its own."""
    workers = [make("gemma3", tmp_path), make("int8", tmp_path)]
    expected = [eventful(worker) for worker in workers]
    for worker in workers:
        worker.runner.model.replayed._steps.clear()
    actual: list = [None, None]

    def run(i):
        actual[i] = eventful(workers[i])

    running = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert actual == expected
