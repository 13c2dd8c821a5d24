"""The engine core with a fake worker behind an executor: bring-up, what it refuses, and failures on the way."""

import dataclasses
import threading

import numpy as np
import pytest
from core_driver import LAYERS, SPEC, FakeExecutor, run
from fake_worker import expected_output
from scheduler_driver import Result, collect

from girih.config import EngineConfig
from girih.engine.checks import warn_of_short_requests
from girih.errors import BindingError, CapacityError, ConfigError, ExecutorError, PlanError, RequestError
from girih.messages import CacheUpdate, TableUpdate
from girih.request import SamplingParams

PARAMS = SamplingParams(seed=0, max_tokens=5)


def test_bring_up_calls_the_workers_in_the_order_of_the_design_and_times_every_phase(make_core, caplog):
    executor = FakeExecutor()
    core = make_core(executor, kv_cache_memory_bytes=None)
    assert executor.calls == [
        "start",
        "load_model",
        "get_kv_cache_spec",
        "determine_available_memory",
        "initialize_from_config",
        "compile_or_warm_up_model",
    ]
    report = core.startup_report
    assert list(report.phases_s)[:2] == ["find model", "plan from config.json"]
    assert report.total_s == pytest.approx(sum(report.phases_s.values()))
    assert len(report.phases_s) == 10
    assert report.memory[0].available_bytes == 1 << 20
    assert "activations measured as" in caplog.text  # the profile made no sense there
    assert core.max_model_len == core.kv_cache_configs[0].max_model_len == 128


@pytest.mark.parametrize(("limit", "warns"), [(128, False), (1 << 20, True)])
def test_a_length_that_auto_cut_short_is_a_warning_with_the_option(caplog, limit, warns):
    warn_of_short_requests(128, limit, EngineConfig(model="m", kv_cache_memory_bytes=1))
    assert [record.getMessage() for record in caplog.records] == [
        f"the KV cache holds requests of up to 128 tokens, prompt and output; the model's limit is {limit}: raise "
        "--kv-cache-memory"
    ] * warns


def test_a_length_that_was_asked_for_is_no_warning(caplog):
    warn_of_short_requests(128, 1 << 20, EngineConfig(model="m", max_model_len=128))
    assert not caplog.records


def test_a_given_cache_size_skips_the_measuring_run(make_core):
    executor = FakeExecutor()
    make_core(executor)
    assert "determine_available_memory" not in executor.calls


@pytest.mark.parametrize(
    "options", [{"kv_cache_memory_bytes": 4096}, {"memory_utilization": 1e-9, "kv_cache_memory_bytes": None}]
)
def test_what_cannot_fit_is_refused_before_a_worker_is_started(make_core, options):
    executor = FakeExecutor()
    with pytest.raises(CapacityError, match="--kv-cache-memory"):
        make_core(executor, max_model_len=128, **options)
    assert executor.calls == []


def test_the_memory_of_other_machines_is_not_known_before_their_workers_are_started(make_core):
    executor = FakeExecutor()
    executor.workers_are_local = False
    make_core(executor, memory_utilization=1e-9, kv_cache_memory_bytes=None)
    with pytest.raises(CapacityError, match="--kv-cache-memory"):
        make_core(executor, max_model_len=128, kv_cache_memory_bytes=4096)
    with pytest.raises(ConfigError, match=r"129 .* 128"):
        make_core(executor, max_model_len=129)


def test_a_length_over_the_model_s_own_is_refused(make_core):
    with pytest.raises(ConfigError, match=r"129 .* 128"):
        make_core(max_model_len=129)


def test_a_layer_that_asks_for_something_else_than_config_json_says_is_named(make_core):
    other = dataclasses.replace(SPEC, num_kv_heads=1)
    executor = FakeExecutor({"get_kv_cache_spec": [{LAYERS[0]: SPEC, LAYERS[1]: other}]})
    with pytest.raises(PlanError, match=rf"layer '{LAYERS[1]}' on the worker of rank 0"):
        make_core(executor)
    assert executor.is_shut_down


def test_a_layer_that_is_missing_or_too_many_is_named(make_core):
    for layers in ({LAYERS[0]: SPEC}, {**dict.fromkeys(LAYERS, SPEC), "extra": SPEC}):
        with pytest.raises(PlanError, match=r"None"):
            make_core(FakeExecutor({"get_kv_cache_spec": [layers]}))


def test_a_worker_that_binds_fewer_blocks_than_planned_is_refused(make_core):  # case 33
    executor = FakeExecutor({"initialize_from_config": [[17]]})
    with pytest.raises(BindingError, match=r"rank 0 bound \[17\] blocks"):
        make_core(executor)
    assert executor.is_shut_down


def test_an_id_beyond_what_was_bound_never_reaches_a_worker(make_core):  # case 33
    core = make_core()
    null_id = core.kv_cache_configs[0].null_block_id(0)
    core.add_request([1, 2, 3], PARAMS)
    row = np.zeros(1, dtype=np.int32)
    tables = (TableUpdate(row, row, row + null_id + 1),)
    core.scheduler.manager.take_cache_update = lambda *_: CacheUpdate((), (), tables, {})
    (result,) = collect(core.step(), {}).values()
    assert f"block id {null_id + 1} of group 0" in result.error


def test_a_step_that_is_not_handed_out_leaves_neither_requests_nor_findable_pages(make_core, monkeypatch):
    core = make_core()
    prompt = list(range(12))

    def broken(step):
        raise ValueError("no memory for the message")

    with monkeypatch.context() as patch:
        patch.setattr(core.executor, "execute_model", broken)
        request = core.add_request(prompt, PARAMS)
        results = collect(core.step(), {})
    assert results == {request: Result(finish_reason="error", error="no memory for the message")}
    assert core.stats().num_running == sum(core.stats().cache.cached_pages) == 0
    assert run(core) == {}
    again = core.add_request(prompt, PARAMS)
    assert run(core) == {again: (expected_output(prompt, 5), "length", None)}


def test_an_interrupt_while_a_step_is_handed_out_ends_its_requests(make_core, monkeypatch):
    core = make_core()

    def interrupted(step):
        raise KeyboardInterrupt

    request = core.add_request([1, 2, 3, 4, 5], PARAMS)
    with monkeypatch.context() as patch:
        patch.setattr(core.executor, "execute_model", interrupted)
        with pytest.raises(KeyboardInterrupt):
            core.step()
    assert not core.scheduler.has_unfinished()
    assert core.has_unfinished(), "its end is still to be told"
    assert list(collect(core.step(), {})) == [request]
    again = core.add_request([1, 2, 3, 4, 5], PARAMS)
    assert run(core)[again][0] == expected_output([1, 2, 3, 4, 5], 5)


def test_a_length_that_auto_lowered_is_what_requests_are_checked_against(make_core):  # case 9
    page_bytes = len(LAYERS) * SPEC.page_size_bytes(4)
    core = make_core(max_model_len="auto", kv_cache_memory_bytes=11 * page_bytes)
    assert core.max_model_len == core.kv_cache_configs[0].max_model_len == 40
    with pytest.raises(RequestError, match=r"60 tokens .* 40 tokens"):
        core.add_request([1] * 60, PARAMS)
    request = core.add_request([1] * 39, PARAMS)
    assert run(core)[request] == (expected_output([1] * 39, 1), "length", None)


def test_an_error_while_starting_leaves_nothing_running(make_core):
    executor = FakeExecutor(broken={"load_model": ExecutorError("worker of rank 0 failed in load_model: x")})
    with pytest.raises(ExecutorError, match="rank 0 failed in load_model: x"):
        make_core(executor)
    assert executor.is_shut_down


def test_requests_get_ids_of_their_own_and_their_tokens(make_core):  # case 70
    core = make_core()
    ids = [core.add_request([1, 2, 3], PARAMS) for _ in range(3)]
    assert len(set(ids)) == 3
    assert run(core) == {i: (expected_output([1, 2, 3], 5), "length", None) for i in ids}
    assert core.add_request([1, 2, 3], PARAMS) not in ids


def test_end_of_sequence_comes_from_the_checkpoint(make_core):
    core = make_core()
    prompt = next([i, j] for i in range(96) for j in range(96) if 96 in expected_output([i, j], 4))
    cut = expected_output(prompt, 4)
    cut = cut[: cut.index(96) + 1]
    ended = core.add_request(prompt, PARAMS)
    ignored = core.add_request(prompt, dataclasses.replace(PARAMS, ignore_eos=True))
    seen = run(core)
    assert seen[ended] == (cut, "stop", None)
    assert seen[ignored] == (expected_output(prompt, 5), "length", None)


def test_an_oversized_prompt_is_refused_and_the_engine_goes_on(make_core):
    core = make_core()
    with pytest.raises(RequestError, match=r"128 tokens"):
        core.add_request([1] * 128, PARAMS)
    request = core.add_request([1] * 127, PARAMS)
    assert len(run(core)[request][0]) == 1


def test_a_failed_step_ends_its_requests_and_the_engine_lives(make_core):
    executor = FakeExecutor()
    core = make_core(executor, max_num_seqs=1)
    first, second = core.add_request([1, 2], PARAMS), core.add_request([3, 4], PARAMS)
    executor.broken["execute_model"] = ExecutorError("worker of rank 0 failed in execute_model: ValueError: x")
    ((request, result),) = collect(core.step(), {}).items()
    assert (request, result.finish_reason) == (first, "error")
    assert "rank 0" in result.error
    assert "ValueError: x" in result.error
    executor.broken.clear()
    assert run(core)[second] == (expected_output([3, 4], 5), "length", None)


def test_a_dead_worker_ends_all_requests_and_no_more_are_taken(make_core):
    executor = FakeExecutor()
    core = make_core(executor, max_num_seqs=1)
    ids = {core.add_request([1, 2], PARAMS), core.add_request([3, 4], PARAMS)}
    executor.broken["execute_model"] = ExecutorError("gone")
    executor.unhealthy = "worker of rank 0 cannot be used"
    results = collect(core.step(), {})
    assert results.keys() == ids
    assert all("gone; worker of rank 0 cannot be used" in result.error for result in results.values())
    assert not core.has_unfinished()
    with pytest.raises(ExecutorError, match="takes no more requests: gone"):
        core.add_request([1], PARAMS)


def test_a_step_that_never_returns_is_an_error_in_bounded_time(make_core, monkeypatch):
    monkeypatch.setattr("girih.engine.core.GRACE_S", 0.01)
    core = make_core(FakeExecutor({"execute_model": None}), step_timeout_s=0.01)
    core.add_request([1, 2], PARAMS)
    (result,) = collect(core.step(), {}).values()
    assert "did not return within 0.02 s" in result.error
    with pytest.raises(ExecutorError):
        core.add_request([1], PARAMS)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_request_is_aborted_while_steps_are_under_way(make_core, is_async):  # cases 67 and 69
    executor = FakeExecutor({"execute_model": None})
    core = make_core(executor, async_scheduling=is_async)
    kept, dropped = core.add_request([1, 2], PARAMS), core.add_request([3, 4], PARAMS)
    core._launch()  # as `step` does before it is interrupted
    assert len(executor.futures) == 1 + is_async

    def answer():
        for future, step in executor.futures:
            future.set_result(executor.worker.execute_model(step))

    threading.Timer(0.02, answer).start()
    assert core.abort(dropped)
    executor.answers.clear()
    assert run(core) == {kept: (expected_output([1, 2], 5), "length", None)}
    assert core.stats().kv_cache_usage == 0


def test_a_request_that_ended_in_an_interrupted_step_is_not_reported_after_its_abort(make_core):
    core = make_core()
    request = core.add_request([1, 2], dataclasses.replace(PARAMS, max_tokens=1))
    core._launch()  # as `step` does before it is interrupted
    assert core.abort(request)  # its result is not taken in yet
    assert core.step() == []


def test_abort_of_an_unknown_or_ended_request_does_nothing(make_core):
    core = make_core()
    request = core.add_request([1, 2], PARAMS)
    assert core.abort(request)
    assert not core.abort(request)
    assert not core.abort("unknown")
    assert core.step() == []


def test_reset_is_refused_while_requests_run(make_core):
    core = make_core()
    core.add_request([1, 2], PARAMS)
    core.step()
    assert not core.reset_prefix_cache()
    run(core)
    assert core.reset_prefix_cache()


def test_shutdown_may_be_repeated(make_core):
    core = make_core()
    core.shutdown()
    core.shutdown()
    with pytest.raises(ExecutorError, match="shut down"):
        core.add_request([1], PARAMS)
