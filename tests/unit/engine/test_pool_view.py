"""What the engine core shows of its pool: whose pages are whose, and of which tokens."""

import pickle

import numpy as np
import pytest

from girih.errors import RequestError
from girih.kv.pool_map import CACHED
from girih.request import SamplingParams


def params(max_tokens):
    return SamplingParams(seed=0, max_tokens=max_tokens)


def test_the_view_names_the_running_requests_and_what_they_have(make_core):
    core = make_core(async_scheduling=False)
    first = core.add_request([*range(10)], params(20))
    for _ in range(3):
        core.step()
    second = core.add_request([*range(10)], params(20))
    core.step()
    view = core.pool_map()
    assert view.request_ids == (first, second)
    assert view.num_prompt_tokens.tolist() == [10, 10]
    assert view.num_output_tokens.tolist() == [4, 1]
    assert view.num_computed_tokens.tolist() == [13, 10]
    assert view.num_cached_tokens.tolist() == [0, 8]
    (pool,) = view.classes
    pages, (first_row, second_row) = pool.groups[0], view.rows.tolist()
    assert (pages.num_holders == 2).sum() == 2  # both full blocks of the prompt
    assert (pages.rows == first_row).sum() == 4
    assert (pages.rows == second_row).sum() == 1
    assert pickle.loads(pickle.dumps(view)).request_ids == view.request_ids


def test_a_pages_tokens_are_those_of_whoever_holds_it(make_core):
    core = make_core(async_scheduling=False)
    ids = [core.add_request([*range(10)], params(20)), core.add_request([*range(8), 50, 51, 52], params(20))]
    for _ in range(4):
        core.step()
    outputs = [request.prompt_token_ids.tolist() + core.scheduler.queues.rows.token_ids(request.row, 10, 99).tolist()
               for request in core.scheduler.queues.running][:1]  # fmt: skip
    pool = core.pool_map().classes[0]
    slabs, per_slab = np.flatnonzero(pool.owners == 0), pool.groups[0].rows.shape[1]
    found = {}
    for (i, j), count in np.ndenumerate(pool.groups[0].num_holders):
        info = core.page_info(0, int(slabs[i]) * per_slab + j)
        assert len(info.holders) == count
        for holder in info.holders:
            found[holder.request_id, holder.first_token] = (holder.end_token, holder.token_ids.tolist(), info.is_cached)
    assert found[ids[0], 0] == found[ids[1], 0] == (4, [0, 1, 2, 3], True)
    assert found[ids[0], 4] == (8, [4, 5, 6, 7], True)
    assert found[ids[0], 12] == (13, outputs[0][12:13], False)
    assert found[ids[1], 8][1][:3] == [50, 51, 52]
    assert [key[1] for key in found if key[0] == ids[1]] == [0, 4, 8, 12]


def test_of_a_page_that_is_only_cached_nobody_is_named(make_core):
    core = make_core()
    core.add_request([*range(10)], params(2))
    while core.has_unfinished():
        core.step()
    pool = core.pool_map().classes[0]
    slabs, per_slab = np.flatnonzero(pool.owners == 0), pool.groups[0].rows.shape[1]
    cached = np.argwhere(pool.groups[0].rows == CACHED).tolist()
    assert len(cached) >= 2
    info = core.page_info(0, int(slabs[cached[0][0]]) * per_slab + cached[0][1])
    assert (info.is_cached, info.holders) == (True, ())


def test_a_page_that_is_not_there_is_refused(make_core):
    core = make_core()
    with pytest.raises(RequestError, match="no page 100000 in group 0"):
        core.page_info(0, 100_000)
