"""`restart_workers`: new workers in place of failed ones, and every request goes on as if nothing had happened."""

import json
from concurrent.futures import Future

import pytest
from core_driver import CONFIG, FakeExecutor, run
from fake_worker import expected_output
from scheduler_driver import collect

from girih.errors import ExecutorError
from girih.request import SamplingParams

PARAMS = SamplingParams(seed=0, max_tokens=9, ignore_eos=True)
SHORT = SamplingParams(seed=0, max_tokens=3, ignore_eos=True)
PROMPTS = [[1, 2, 3], list(range(20)), list(range(18)), [9], list(range(30, 41)), [4, 4]]  # of 6, 4 run at once


class FailingExecutor(FakeExecutor):
    """Fails the steps with these numbers, counted over all workers that there were, as `how` says."""

    def __init__(self, failing, how="raise", **options):
        super().__init__(**options)
        self.failing, self.how = set(failing), how
        self.num_steps = self.num_starts = 0
        self.has_failed = False

    def start(self):
        self.unhealthy, self.has_failed, self.is_shut_down = None, False, False
        self.num_starts += 1
        super().start()

    def execute_model(self, step):
        self.num_steps += 1
        if self.unhealthy is not None:
            raise ExecutorError(self.unhealthy)
        self.has_failed |= self.num_steps in self.failing
        if not self.has_failed:
            return super().execute_model(step)
        if self.how == "die":
            self.unhealthy = "rank 0 was killed"
        future = Future()
        future.set_exception(ExecutorError("rank 0 was killed" if self.how == "die" else "rank 0: x"))
        return future


def run_all(core):
    """Return what came of all prompts, in order."""
    ids = [core.add_request(prompt, PARAMS) for prompt in PROMPTS]
    results = run(core)
    return [results[request_id] for request_id in ids]


@pytest.mark.parametrize("how", ["raise", "die"])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("failing", [{1}, {2}, {5, 9}, {3, 4}, {2, 6, 10, 14}, range(1, 40, 3)], ids=str)
def test_every_request_finishes_with_its_tokens(make_core, failing, is_async, how):
    executor = FailingExecutor(failing, how)
    core = make_core(executor, restart_workers=True, async_scheduling=is_async)
    results = run_all(core)
    assert results == [(expected_output(prompt, 9), "length", None) for prompt in PROMPTS]
    assert core.stats().num_restarts == executor.num_starts - 1 > 0
    assert core.stats().num_preemptions == 0
    core.scheduler.manager.check()


def test_without_it_dead_workers_end_every_request(make_core):
    core = make_core(FailingExecutor({3}, "die"))
    results = run_all(core)
    assert {(finish_reason, error) for _, finish_reason, error in results} == {("error", "rank 0 was killed")}
    with pytest.raises(ExecutorError, match="takes no more requests: rank 0 was killed"):
        core.add_request([1], PARAMS)


def test_a_request_that_no_worker_survives_does_not_take_those_that_wait_along(make_core):
    executor = FailingExecutor({2, 4, 6})
    core = make_core(executor, restart_workers=True, async_scheduling=False, max_num_batched_tokens=12)
    results = run_all(core)
    assert {error for _, _, error in results[:2]} == {None, "rank 0: x (the last of 3 failures since its last token)"}
    assert [error for _, _, error in results].count(None) >= 4
    assert results[4:] == [(expected_output(prompt, 9), "length", None) for prompt in PROMPTS[4:]]


def test_workers_that_die_while_nobody_waits_are_started_anew_for_the_next_request(make_core):
    executor = FailingExecutor(())
    core = make_core(executor, restart_workers=True)
    run_all(core)
    executor.unhealthy = "rank 0 was killed"
    assert run_all(core) == [(expected_output(prompt, 9), "length", None) for prompt in PROMPTS]
    assert core.stats().num_restarts == 1


def test_when_no_new_workers_can_be_started_every_request_is_told_why(make_core):
    executor = FailingExecutor({3}, "die")
    core = make_core(executor, restart_workers=True)
    executor.broken["load_model"] = ExecutorError("rank 0: no memory")
    (error,) = {error for _, _, error in run_all(core)}
    assert error == "rank 0 was killed; and new workers could not be started: rank 0: no memory"
    assert executor.is_shut_down
    with pytest.raises(ExecutorError, match="takes no more requests"):
        core.add_request([1], PARAMS)


def test_after_an_interrupt_while_new_workers_start_the_next_step_starts_them(make_core):
    executor = FailingExecutor({3}, "die")
    core = make_core(executor, restart_workers=True)
    executor.broken["load_model"] = KeyboardInterrupt()
    core.add_request([1, 2, 3], PARAMS)
    with pytest.raises(KeyboardInterrupt):
        run(core)
    del executor.broken["load_model"]
    ((tokens, *end),) = run(core).values()
    assert tokens == expected_output([1, 2, 3], 9)[-len(tokens) :]  # those of the steps before it were told already
    assert end == ["length", None]


@pytest.mark.parametrize("when", ["start", "load_model", "after"])
def test_an_engine_that_is_shut_down_during_a_restart_stays_so(make_core, when):
    executor = FailingExecutor({3}, "die")
    core = make_core(executor, restart_workers=True)

    class ShutsDown(dict):
        """Stands for what another thread does while a method is called."""

        def __contains__(self, method):
            if method == when:
                core.shutdown()
            return False

    executor.broken = ShutsDown()
    request = core.add_request([1, 2, 3], PARAMS)
    if when == "after":
        collect(core.step(), {})
        core.shutdown()
    assert run(core)[request][1:] == ("error", "it was shut down")
    assert executor.num_starts == (1 if when == "after" else 2)
    assert executor.is_shut_down


def test_another_model_in_the_place_of_the_one_that_requests_began_with_is_refused(make_core, tmp_path):
    executor = FailingExecutor({3}, "die")
    core = make_core(executor, restart_workers=True)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"rms_norm_eps": 1e-3}))
    (error,) = {error for _, _, error in run_all(core)}
    assert "could not be started: " in error
    assert "config.json is not what it was" in error


@pytest.mark.parametrize("is_async", [False, True])
def test_a_prompt_whose_second_chunk_no_worker_survives_ends(make_core, is_async):
    executor = FailingExecutor(())
    hand_over = executor.execute_model

    def execute_model(step):
        executor.has_failed |= bool((step.num_computed_tokens >= 12).any())
        return hand_over(step)

    executor.execute_model = execute_model
    core = make_core(executor, restart_workers=True, async_scheduling=is_async, max_num_batched_tokens=12)
    long, short = core.add_request(list(range(40)), PARAMS), core.add_request([1, 2], SHORT)
    results = run(core)
    assert "(the last of 3 failures since its last token)" in results[long][2]
    assert results[short] == (expected_output([1, 2], 3), "length", None)
    assert executor.num_starts == 4


def test_a_pool_that_was_made_smaller_stays_so(make_core):
    core = make_core(FailingExecutor({3}), restart_workers=True)
    smaller = core.resize_kv_cache(core.kv_cache_configs[0].total_bytes // 2)
    limit = core.max_model_len
    assert [error for _, _, error in run_all(core)] == [None] * 6
    assert core._pool_memory.total_bytes == smaller
    assert core.max_model_len == limit


def test_requests_that_new_workers_have_no_memory_for_are_told_and_the_others_go_on(make_core, monkeypatch):
    executor = FailingExecutor({6})
    core = make_core(executor, restart_workers=True, max_num_batched_tokens=64, kv_cache_memory_bytes=None)
    long, short = core.add_request(list(range(60)), PARAMS), core.add_request([1, 2, 3], PARAMS)
    results = {}
    collect(core.step(), results)
    measured = executor.collective_rpc("determine_available_memory")[0]
    less = measured.__class__(**{**vars(measured), "available_bytes": 12 << 10})
    executor.answers["determine_available_memory"] = [less]
    while core.has_unfinished():
        collect(core.step(), results)
    assert core.max_model_len < 60
    assert "new workers can serve requests of up to" in results[long].error
    assert results[short].tokens == expected_output([1, 2, 3], 9)
    assert results[short].error is None
