"""One formula for what fits: start-up, concurrency and admission agree because they ask the same function."""

import sys
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from planner_models import mixed

from girih.kv import StateSpec, get_kv_cache_configs
from girih.kv.capacity import (
    capacity_tokens,
    largest,
    max_context_tokens,
    max_request_tokens,
    num_concurrent_requests,
    pages_at,
    peak_pages,
    request_fits,
    slabs_needed,
    steady_pages,
)
from girih.kv.report import plan_report
from girih.units import GIB, MIB


def plan(memory, num_full=3, num_sliding=15, window=512, **options):
    layers = mixed(num_full, num_sliding, window)
    return get_kv_cache_configs([layers], [memory], **{"max_model_len": 4096, **options})[0]


def test_slabs_are_rounded_up_per_group():
    config = plan(GIB)
    assert [group.pages_per_slab for group in config.groups] == [1, 5]
    assert slabs_needed([3, 11], config.groups) == 3 + 3
    assert slabs_needed([0, 0], config.groups) == 0


def test_a_sliding_group_is_billed_for_its_window_and_a_block():
    groups = plan(GIB).groups
    assert peak_pages(groups, 4096) == steady_pages(groups, 4096) == [33, 256]
    assert peak_pages(groups, 100) == [7, 7]


def test_pages_at_a_length_are_exactly_those_of_the_step_that_computes_it():
    groups = plan(GIB, window=1024).groups
    sliding, full = zip(*(pages_at(groups, n) for n in range(2048, 2064)), strict=True)
    assert set(full) == {128, 129}
    assert sliding == (64,) + (65,) * 15  # token 2048 reads 1024 .. 2047: 64 whole blocks; the next ones a part more
    assert pages_at(groups, 1) == [1, 1]
    assert pages_at(groups, 2048, num_lookahead_tokens=1) == [65, 129]
    for n in range(1, 3000, 7):
        assert all(at <= most for at, most in zip(pages_at(groups, n), steady_pages(groups, n), strict=True))


@pytest.mark.parametrize("lookahead", [0, 3])
def test_a_request_holds_a_state_and_one_more_for_each_draft_token(lookahead):
    layers = {f"layers.{i}": StateSpec(((4, 1024),), ("float32",)) for i in range(4)}  # 64 KiB a request
    (config,) = get_kv_cache_configs([layers], [MIB], max_model_len=10**6, num_lookahead_tokens=lookahead)
    assert config.num_slabs == 15
    assert num_concurrent_requests(config, 10**6) == 15 // (1 + lookahead)


def test_largest_finds_every_threshold():
    for limit in (0, 1, 7, 100):
        for threshold in range(limit + 2):
            assert largest(limit, lambda n, threshold=threshold: n <= threshold) == min(limit, threshold)


@settings(max_examples=60, deadline=None)
@given(
    memory=st.integers(8 * MIB, 4 * GIB),
    num_full=st.integers(0, 9),
    num_sliding=st.integers(0, 9),
    length=st.integers(1, 20_000),
)
def test_concurrency_is_the_greatest_number_that_fits(memory, num_full, num_sliding, length):
    if num_full + num_sliding == 0:
        return
    config = plan(memory, num_full, num_sliding, max_model_len="auto", model_limit=20_000)
    count = num_concurrent_requests(config, length)
    each = steady_pages(config.groups, length)
    if count:
        assert slabs_needed([count * n for n in each], config.groups) <= config.num_slabs
    if request_fits(config, length):
        assert count >= 1  # accepted alone, so at least one
        assert slabs_needed([(count + 1) * n for n in each], config.groups) > config.num_slabs
    else:
        assert count == 0


def test_capacity_in_tokens_is_concurrency_times_length():  # case 16
    config = plan(GIB)
    for length in (1, 100, 1000, 4096):
        assert capacity_tokens(config, length) == num_concurrent_requests(config, length) * length
    rows = plan_report(config, GIB, lengths=(1000, 4096))["requests_at_once"]
    assert [(row["requests"], row["all_tokens"]) for row in rows] == [
        (num_concurrent_requests(config, n), capacity_tokens(config, n)) for n in (1000, 4096)
    ]


def test_the_longest_context_of_n_users_is_the_greatest_that_fits():
    config = plan(256 * MIB)
    for users in (1, 2, 5, 9, 100):
        tokens = max_context_tokens(config, users)
        assert tokens == 0 or num_concurrent_requests(config, tokens) >= users
        assert tokens == config.max_model_len or num_concurrent_requests(config, tokens + 1) < users


def test_a_smaller_pool_serves_shorter_requests_and_says_how_long():  # cases 10 and 78
    config = replace(plan(GIB, 3, 0), num_slabs=100)
    assert max_request_tokens(config) == 1600
    assert request_fits(config, 1600)
    assert not request_fits(config, 1601)


def test_drafts_take_room_beyond_the_request():
    config = replace(plan(GIB, 3, 0), num_slabs=100, num_lookahead_tokens=3)
    assert max_request_tokens(config) == 1597


def test_a_pool_without_slabs_serves_nothing():
    config = replace(plan(GIB), num_slabs=0)
    assert max_request_tokens(config) == 0
    assert num_concurrent_requests(config, 1) == 0


def test_a_model_without_caches_is_limited_by_seats_not_bytes():  # case 105
    (config,) = get_kv_cache_configs([{}], [0], max_model_len=77)
    assert max_request_tokens(config) == 77
    assert num_concurrent_requests(config, 77) == sys.maxsize


@pytest.mark.parametrize("window", [511, 512, 513])
def test_each_group_is_billed_by_its_own_rule(window):
    (config,) = get_kv_cache_configs([mixed(1, 1, window)], [GIB], max_model_len=4096)
    assert sorted(peak_pages(config.groups, 4096)) == [-(-(window - 1) // 16) + 1, 256]
