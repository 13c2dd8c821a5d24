"""Memory of the KV cache at run time: free slabs go back to the system, and the pool shrinks and grows while in use."""

import functools
import itertools
import random

import pytest
from core_driver import HYBRID_CONFIG, HYBRID_SPECS, FakeExecutor
from fake_worker import expected_output
from scheduler_driver import collect

from girih.errors import CapacityError, RequestError
from girih.request import SamplingParams
from girih.units import format_bytes

PARAMS = SamplingParams(seed=0, max_tokens=8, ignore_eos=True)


def prompt(length, start=0):
    return [(start + i * i) % 97 for i in range(length)]


def run(core, results=None):
    results = {} if results is None else results
    while core.has_unfinished():
        collect(core.step(), results)
    return results


@pytest.fixture
def executor():
    return FakeExecutor({"get_kv_cache_spec": [HYBRID_SPECS]})


@pytest.fixture
def core_of(make_core, executor):
    """Make a core with layers of two kinds, and a worker that is `executor`."""
    return functools.partial(make_core, executor, model_config=HYBRID_CONFIG)


def total_bytes(core):
    return core.kv_cache_configs[0].total_bytes


def test_slabs_go_back_to_the_system_once_nobody_runs(core_of, executor):
    core = core_of(enable_prefix_caching=False)
    for round_ in range(2):
        for i in range(4):
            core.add_request(prompt(20, i), PARAMS)
        core.step()
        assert executor.worker.released == []
        run(core)
        released, executor.worker.released = executor.worker.released, []
        assert len(set(released)) == len(released) > 0, round_
        core.step()
        assert executor.worker.released == []


def test_cached_prefixes_are_not_given_back(core_of, executor):
    core = core_of()
    core.add_request(prompt(20), PARAMS)
    run(core)
    again = core.add_request([*prompt(20), 5], PARAMS)
    result = run(core)[again]
    assert result.tokens == expected_output([*prompt(20), 5], 8)
    assert result.num_cached_tokens == 20


def test_a_worker_that_cannot_give_memory_back_goes_on(core_of, executor, caplog):
    core = core_of(enable_prefix_caching=False)
    executor.broken["release_slabs"] = CapacityError("no", need_bytes=0, have_bytes=0, fitting_tokens=None)
    for _ in range(2):
        request = core.add_request(prompt(20), PARAMS)
        assert run(core)[request].tokens == expected_output(prompt(20), 8)
    assert "could not be given back" in caplog.text


def test_a_pool_shrinks_under_running_requests_and_grows_again(core_of, executor):
    core = core_of()
    whole = total_bytes(core)
    num_slabs = core.kv_cache_configs[0].num_slabs
    for i in range(4, 12):
        core.add_request(prompt(100, i), PARAMS)
    run(core)  # what they cached is all over the pool
    requests = {core.add_request(prompt(20, i), PARAMS): prompt(20, i) for i in range(4)}
    results = collect(core.step(), {})
    (smaller,) = core.resize_kv_cache(whole // 2)
    assert 0.4 * whole < smaller <= whole // 2
    kept = smaller // core.kv_cache_configs[0].slab_bytes
    assert set(range(kept + 1, num_slabs)) <= set(executor.worker.released) | untouched(core, executor)
    run(core, results)
    assert {i: result.tokens for i, result in results.items()} == {
        i: expected_output(p, 8) for i, p in requests.items()
    }
    assert core.resize_kv_cache(10 * whole) == [whole]
    assert core.max_model_len == 128
    more = {core.add_request(prompt(100, i), PARAMS): prompt(100, i) for i in range(4)}
    assert {i: result.tokens for i, result in run(core).items()} == {i: expected_output(p, 8) for i, p in more.items()}
    assert executor.worker.num_pages_moved > 0
    page_bytes = core.kv_cache_configs[0].groups[0].page_size_bytes
    assert core.stats().moved_bytes >= page_bytes
    core.scheduler.manager.check()


def untouched(core, executor):
    """Return the slabs that the worker has never written to."""
    return set(range(core.kv_cache_configs[0].num_slabs)) - executor.worker.pools[0].slab_owner.keys()


def test_an_idle_engine_keeps_cached_prefixes_that_fit(core_of):
    core = core_of()
    core.add_request(prompt(60), PARAMS)
    run(core)
    assert not core.has_unfinished()
    core.resize_kv_cache(total_bytes(core) // 2)
    again = core.add_request([*prompt(60), 5], PARAMS)
    result = run(core)[again]
    assert result.tokens == expected_output([*prompt(60), 5], 8)
    assert result.num_cached_tokens > 0


def test_the_longest_request_follows_the_size_and_longer_ones_are_cut(core_of):
    core = core_of(max_num_seqs=2)
    unlimited = SamplingParams(seed=0, max_tokens=None, ignore_eos=True)
    request = core.add_request(prompt(10), unlimited)
    waiting = [core.add_request(prompt(10, i), unlimited) for i in range(1, 5)]
    collect(core.step(), results := {})
    core.resize_kv_cache(total_bytes(core) // 8)
    assert 30 < core.max_model_len < 128
    with pytest.raises(RequestError, match=f"{core.max_model_len} tokens"):
        core.add_request(prompt(100), PARAMS)
    run(core, results)
    for i in (request, *waiting):
        assert (len(results[i].tokens), results[i].finish_reason) == (core.max_model_len - 10, "length")


def test_more_than_was_planned_is_not_to_be_had_and_said(core_of, caplog):
    core = core_of()
    planned, slab_bytes = total_bytes(core), core.kv_cache_configs[0].slab_bytes
    assert core.resize_kv_cache(planned + slab_bytes - 1) == [planned]
    assert not caplog.records
    assert core.resize_kv_cache(planned + slab_bytes) == [planned]
    assert f"planned with {format_bytes(planned)}" in caplog.text


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3])
def test_what_running_requests_need_is_not_taken_away(core_of, executor, share):
    core = core_of(max_num_seqs=4)
    whole = total_bytes(core)
    requests = {core.add_request(prompt(100, i), PARAMS): prompt(100, i) for i in range(4)}
    results = collect(core.step(), {})
    with pytest.raises(
        CapacityError, match=r"KV cache of .* (must hold one of 103 tokens|running requests hold)"
    ) as refusal:
        core.resize_kv_cache(int(share * whole))
    assert refusal.value.need_bytes > refusal.value.have_bytes
    assert core.max_model_len == 128
    assert executor.worker.released == []
    run(core, results)
    assert {i: result.tokens for i, result in results.items()} == {
        i: expected_output(p, 8) for i, p in requests.items()
    }
    assert core.stats().num_preemptions == 0


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_sizes_every_request_gets_its_tokens(core_of, executor, seed):
    rng = random.Random(seed)
    core = core_of(max_num_batched_tokens=rng.choice([16, 64]))
    whole, results, prompts = total_bytes(core), {}, {}
    for i in itertools.count():
        if i < 20:
            tokens = prompt(rng.randint(1, 60), rng.randint(0, 3))
            prompts[core.add_request(tokens, PARAMS)] = tokens
        elif not core.has_unfinished():
            break
        collect(core.step(), results)
        if rng.random() < 0.4:
            try:
                (size,) = core.resize_kv_cache(rng.randint(whole // 4, whole))
            except CapacityError:
                continue
            assert size <= whole
            core.scheduler.manager.check()
    assert {i: result.tokens for i, result in results.items()} == {i: expected_output(p, 8) for i, p in prompts.items()}
    assert executor.worker.released
    assert (core.stats().moved_bytes > 0) == (executor.worker.num_pages_moved > 0)
