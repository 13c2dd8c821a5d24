"""Where the time of steps goes: all of it is in some part, tokens stay the same, and nothing is left behind."""

from time import perf_counter

import pytest

from tests.step_driver import StepDriver, make_worker
from tests.tiny_models import tiny_gemma3

PROMPT = list(range(3, 40))


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    return make_worker(tiny_gemma3(tmp_path_factory.mktemp("profiled")))


def test_parts_add_up_to_the_time_from_step_to_step(worker):
    driver = StepDriver(worker)
    driver.add(0, PROMPT)
    expected = driver.run(0, 6)
    worker.start_profile()
    driver.add(1, PROMPT)
    start = perf_counter()
    assert driver.run(1, 6) == expected
    elapsed = perf_counter() - start
    times = worker.stop_profile()
    assert times.num_steps == 6
    assert all(seconds > 0 for seconds in times.seconds.values())
    assert 0.5 * elapsed < sum(times.seconds.values()) <= elapsed


def test_nothing_is_measured_and_nothing_left_behind_after_the_end(worker):
    driver = StepDriver(worker)
    worker.start_profile()
    worker.start_profile()
    times = worker.stop_profile()
    layers = list(worker.runner.context.layers.values())
    changed = [worker.runner, worker.runner.batch, *layers, *worker.runner.model.modules()]
    assert not any(name in vars(owner) for owner in changed for name in ("forward", "logits", "execute_model", "apply"))
    driver.add(0, PROMPT)
    driver.run(0, 2)
    assert times.num_steps == 0
    assert worker.stop_profile().num_steps == 0


@pytest.mark.parametrize("is_on", [True, False])
def test_steps_are_replayed_after_the_end_if_they_were_before(worker, is_on):
    StepDriver(worker)  # gives it a cache
    replayed = worker.runner.model.replayed
    replayed.is_on = is_on
    worker.start_profile()
    assert not replayed.is_on
    worker.start_profile()
    worker.stop_profile()
    assert replayed.is_on is is_on
    replayed.is_on = True
