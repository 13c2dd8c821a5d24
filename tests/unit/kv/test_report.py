"""What `girih plan` and the engine report of a plan, in numbers."""

import pytest
from planner_models import cut, every, mixed, plan

from girih.kv import FullAttentionSpec, SharedCacheSpec, StateSpec, get_kv_cache_configs
from girih.kv.capacity import max_context_tokens, num_concurrent_requests
from girih.kv.report import bytes_per_token, longest_context, plan_report, request_bytes, requests_at_once
from girih.units import GIB, KIB, MIB

FULL = FullAttentionSpec(2, 64, "bfloat16")  # 512 bytes per token
STATE = StateSpec(((64, 256),), ("float32",))  # 64 KiB


def test_the_bytes_of_a_token_are_those_that_still_grow():
    config = plan(mixed(3, 15), GIB, max_model_len=4096)
    assert bytes_per_token(config, 1) == 18 * KIB  # 1 KiB per layer
    assert bytes_per_token(config, 4096) == 3 * KIB
    assert request_bytes(config, 4096) == 3 * 4096 * KIB + 15 * 33 * 16 * KIB


def test_a_state_costs_the_request_and_not_the_token():
    config = plan(every(4, 8, FULL, STATE), GIB, max_model_len=4096, num_lookahead_tokens=1)
    assert bytes_per_token(config, 1) == bytes_per_token(config, 4096) == 2 * 512
    assert request_bytes(config, 4095) == 4096 * 2 * 512 + 2 * 6 * 64 * KIB
    first, second = plan_report(config, GIB)["groups"]
    assert (first["holds_state"], first["kv_bytes_per_token"], first["num_layers"]) == (True, 0, 6)
    assert (second["holds_state"], second["kv_bytes_per_token"]) == (False, 1024)


def test_a_report_counts_groups_and_what_is_lost():
    config = plan(mixed(3, 15), GIB, max_model_len=4096)
    report = plan_report(config, GIB)
    assert report["num_groups"] == len(report["groups"]) == 2
    assert 0.99 < report["usable"] <= 1
    assert report["waste"] == max(group["waste"] for group in report["groups"]) < 0.01
    assert report["spare_bytes"] == GIB - config.total_bytes


def test_layers_that_read_another_s_cache_are_counted_apart():
    layers = {"a": FULL, "b": FULL, "c": SharedCacheSpec("a", FULL)}
    (group,) = plan_report(plan(layers, GIB, max_model_len=99), GIB)["groups"]
    assert (group["num_layers"], group["num_sharing_layers"], group["layer_names"]) == (2, 1, ["a", "c", "b"])


def test_several_workers_hold_what_the_tightest_class_holds():
    specs = cut(every(1, 8, FULL, FULL) | {"s": STATE}, [2, 6, 1])
    configs = get_kv_cache_configs(specs, [GIB, 60 * MIB, GIB], max_model_len=4096)
    assert len({config.stage_class for config in configs}) == 2
    (row,) = requests_at_once(configs, [1000])
    assert row["requests"] == min(num_concurrent_requests(config, 1000) for config in configs) == 20
    assert row["all_tokens"] == 20_000
    assert longest_context(configs, 30)["tokens"] == min(max_context_tokens(config, 30) for config in configs)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_model_without_caches_has_no_requests_to_count(workers):  # case 105
    configs = get_kv_cache_configs([{}] * workers, [0] * workers, max_model_len=9)
    assert requests_at_once(configs, [9]) == []
    report = plan_report(configs[0], 100)
    assert (report["waste"], report["usable"], report["num_groups"], report["block_size"]) == (0.0, 1.0, 0, None)
