"""What the engine core tells of its prefix cache, also over the end of its workers."""

from core_driver import FakeExecutor

from girih.request import SamplingParams

PARAMS = SamplingParams(seed=0, max_tokens=5)


def run(core, tokens, **options):
    core.add_request(tokens, PARAMS, **options)
    while core.has_unfinished():
        core.step()


def test_the_events_name_the_units_of_prompt_and_output(make_core):
    core = make_core(kv_events=True)
    assert core.take_kv_events().is_cleared
    run(core, [*range(10)])
    events = core.take_kv_events()
    assert not events.is_cleared
    assert events.token_ids[:2].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert events.depths.tolist() == [1, 2, 3]
    assert events.token_ids[2, :2].tolist() == [8, 9]
    assert not core.take_kv_events()


def test_without_the_option_there_are_none(make_core):
    core = make_core()
    run(core, [*range(10)])
    assert not core.take_kv_events()


def test_after_the_workers_were_started_anew_all_is_cleared_first(make_core):
    executor = FakeExecutor()
    core = make_core(executor, kv_events=True, restart_workers=True)
    core.take_kv_events()
    run(core, [*range(10)])
    known = {tuple(key) for key in core.take_kv_events().keys.tolist()}
    executor.broken["execute_model"] = RuntimeError("a worker failed")
    core.add_request([*range(20, 30)], PARAMS)
    core.step()
    del executor.broken["execute_model"]
    while core.has_unfinished():
        core.step()
    events = core.take_kv_events()
    assert core.stats().num_restarts == 1
    assert events.is_cleared
    assert events.token_ids[0].tolist() == [20, 21, 22, 23]
    assert not known & {tuple(key) for key in events.keys.tolist()}


def test_a_step_that_fails_clears_all(make_core):
    executor = FakeExecutor()
    core = make_core(executor, kv_events=True)
    run(core, [*range(10)])
    core.take_kv_events()
    executor.broken["execute_model"] = RuntimeError("out of luck")
    run(core, [*range(10)])
    events = core.take_kv_events()
    assert events.is_cleared
    assert len(events.groups) == 0
