"""Whatever plan, requests, aborts and arrivals: every request gets its own tokens, in order, and no page is lost."""

import pytest
from fake_worker import expected_output
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_driver import Engine, chunked, full, plan_stages, prompt, sliding, state

from girih.errors import CapacityError
from girih.sched.policies import fcfs, priority

LAYERS = st.lists(
    st.one_of(
        st.builds(full, st.sampled_from([1, 2, 3])),
        st.builds(sliding, st.integers(1, 20), st.sampled_from([1, 2])),
        st.builds(chunked, st.sampled_from([4, 8, 20])),
        st.builds(state, st.sampled_from([3, 8, 40])),
    ),
    min_size=1,
    max_size=5,
)
REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 60),  # prompt tokens
        st.integers(0, 3),  # prompts that start alike; 3: the next turn after the request before
        st.integers(1, 30),  # output tokens
        st.integers(0, 2),  # priority
        st.integers(0, 6),  # steps before it arrives
        st.sampled_from([None] * 6 + [1, 3, 9]),  # steps after which it is aborted
    ),
    min_size=1,
    max_size=12,
)


def run(stages, num_pages, budget, max_num_seqs, policy, caching, requests, under_way, model_limit=90):
    try:
        configs = plan_stages(*stages, num_pages=num_pages, model_limit=model_limit)
    except CapacityError:
        return
    engine = Engine(
        configs,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        policy=policy,
        prefix_caching=caching,
        max_under_way=under_way[0],
        num_micro_batches=under_way[1],
    )
    aborts, before = [], []
    limit = engine.scheduler.max_request_tokens
    for length, start, num_output, importance, delay, abort_after in requests:
        for _ in range(delay):
            engine.step()
        if limit < 2:
            return
        tokens = prompt(length, start=start)
        if start == 3 and before:
            tokens = [*before, *expected_output(before, num_output), *tokens[: length // 8]]
        before = tokens[: limit - 1]
        request = engine.add(before, num_output, priority=importance)
        if abort_after is not None:
            aborts.append((abort_after, request))
    for step in range(20_000):
        for _, request in [item for item in aborts if item[0] == step]:
            engine.scheduler.abort(request.request_id)
            engine.requests.pop(request.request_id)
        if not engine.scheduler.has_unfinished() and not engine.under_way:
            break
        engine.step()
    else:
        raise AssertionError("the engine does not finish")
    for _, request in aborts:
        engine.requests.pop(request.request_id, None)
    engine.assert_all_as_alone()
    engine.assert_nothing_held()


ARGUMENTS = {
    "stages": st.one_of(st.lists(LAYERS, min_size=1, max_size=1), st.lists(LAYERS, min_size=2, max_size=3)),
    "num_pages": st.integers(2, 80),
    "budget": st.integers(1, 70),
    "under_way": st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 4)]),
    "max_num_seqs": st.integers(1, 8),
    "policy": st.sampled_from([fcfs, priority]),
    "caching": st.booleans(),
    "requests": REQUESTS,
}


@settings(max_examples=40, deadline=None)
@given(**ARGUMENTS)
def test_every_request_gets_what_it_gets_alone(**arguments):
    run(**arguments)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@settings(max_examples=3000, deadline=None)
@given(**ARGUMENTS, model_limit=st.sampled_from([90, 400]))
def test_every_request_gets_what_it_gets_alone_many_times(**arguments):
    run(**arguments)
