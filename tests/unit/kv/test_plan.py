"""The plan as a whole: what is accepted runs, what is refused says why, and nothing exceeds the memory."""

import json
import logging
import math
import time

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from planner_models import check_plan, mixed, plan

from girih.errors import CapacityError, ConfigError, PlanError
from girih.kv import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec, get_kv_cache_configs
from girih.kv.capacity import max_request_tokens, peak_pages, request_fits, slabs_needed
from girih.kv.report import group_waste
from girih.kv.specs.state import StateSpec
from girih.units import GIB, KIB, MIB

LLAMA_LIKE = {f"layer.{i}": FullAttentionSpec(8, 128, "bfloat16") for i in range(28)}  # 112 KiB per token


def plan_or_refusal(layers, memory, **options):
    """Return (plan, None) or (None, the refusal)."""
    try:
        return plan(layers, memory, **options), None
    except CapacityError as error:
        return None, error


layer_strategy = st.tuples(
    st.sampled_from([0, 1, 16, 17, 64, 500]), st.integers(1, 8), st.sampled_from([7, 16, 64]), st.integers(1, 9)
)
models = st.lists(layer_strategy, min_size=1, max_size=5)


def model(kinds):
    layers = {}
    for window, heads, head_size, count in kinds:
        for _ in range(count):
            spec = (
                SlidingWindowSpec(heads, head_size, "float32", window, block_size_multiple=1)
                if window
                else FullAttentionSpec(heads, head_size, "float32", block_size_multiple=1)
            )
            layers[f"layer.{len(layers)}"] = spec
    return layers


@settings(max_examples=40, deadline=None)
@given(
    kinds=models,
    memory=st.integers(1, 1 << 28),
    block_size=st.sampled_from([None, 1, 4, 64]),
    length=st.integers(1, 3000),
    lookahead=st.sampled_from([0, 3]),
)
def test_a_plan_fits_and_serves_its_length_or_the_refusal_is_exact(kinds, memory, block_size, length, lookahead):
    layers = model(kinds)
    options = {"block_size": block_size, "num_lookahead_tokens": lookahead}
    config, refusal = plan_or_refusal(layers, memory, max_model_len=length, **options)
    if config:
        check_plan(config, layers, memory)
        assert config.max_model_len == max_request_tokens(config) == length
        assert KVCacheConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
        return
    assert refusal.have_bytes == memory < refusal.need_bytes
    check_plan(plan(layers, refusal.need_bytes, max_model_len=length, **options), layers, refusal.need_bytes)
    with pytest.raises(CapacityError):
        plan(layers, refusal.need_bytes - 1, max_model_len=length, **options)
    assert (refusal.fitting_tokens or 0) < length
    if refusal.fitting_tokens:
        check_plan(plan(layers, memory, max_model_len=refusal.fitting_tokens, **options), layers, memory)


@settings(max_examples=40, deadline=None)
@given(kinds=models, memory=st.integers(1, 1 << 26), limit=st.integers(1, 5000))
def test_auto_finds_about_the_longest_length_and_serves_it(kinds, memory, limit):
    layers = model(kinds)
    config, refusal = plan_or_refusal(layers, memory, max_model_len="auto", model_limit=limit)
    if refusal:
        assert refusal.fitting_tokens is None
        assert plan_or_refusal(layers, memory, max_model_len=1)[1]
        return
    check_plan(config, layers, memory)
    assert 1 <= config.max_model_len <= limit
    assert request_fits(config, config.max_model_len)
    if config.max_model_len < limit:
        with pytest.raises(CapacityError):
            plan(layers, memory, max_model_len=limit)
        with pytest.raises(CapacityError):  # whatever the layout, this is out of reach
            plan(layers, memory, max_model_len=min(limit, math.ceil(config.max_model_len / 0.97) + 17))


def test_auto_counts_the_null_page():  # case 7
    layers = {"a": FullAttentionSpec(1, 64, "float32", block_size_multiple=128)}
    page = 128 * 64 * 4 * 2
    config = plan(layers, 8 * page, max_model_len="auto", model_limit=4096)
    assert config.groups[0].block_size == 128
    assert config.max_model_len == 896
    assert slabs_needed(peak_pages(config.groups, 896), config.groups) == config.num_slabs == 7


@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize("length", [1000, 1008, 1009, 1024, 4096])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_the_smallest_pool_that_start_up_accepts_serves_the_length(block_size, length, lookahead):  # case 8
    layers = mixed(2, 1, window=100)
    with pytest.raises(CapacityError) as refusal:
        plan(layers, 1, max_model_len=length, block_size=block_size, num_lookahead_tokens=lookahead)
    config = plan(
        layers,
        refusal.value.need_bytes,
        max_model_len=length,
        block_size=block_size,
        num_lookahead_tokens=lookahead,
    )
    assert slabs_needed(peak_pages(config.groups, length, lookahead), config.groups) == config.num_slabs
    assert max_request_tokens(config) == length


def test_a_pool_given_by_hand_is_checked_like_any_other():  # case 10
    layers = {"a": FullAttentionSpec(1, 64, "float32")}
    memory = 50 * layers["a"].page_size_bytes(16)  # 49 pages and the null page
    with pytest.raises(CapacityError, match="784 tokens") as refusal:
        plan(layers, memory, max_model_len=1008)
    assert refusal.value.fitting_tokens == 784
    assert plan(layers, memory, max_model_len="auto", model_limit=1008).max_model_len == 784
    with pytest.raises(CapacityError):
        plan(layers, layers["a"].page_size_bytes(16), max_model_len=2048)  # one page: the null page alone


def test_a_refusal_says_need_have_what_fits_and_the_options():  # case 12
    with pytest.raises(CapacityError) as refusal:
        plan(LLAMA_LIKE, 4 * GIB, max_model_len=40960)
    error = refusal.value
    assert "needs 4.38 GiB, there is 4.00 GiB" in str(error)
    assert error.need_bytes == (40960 + 16) * 112 * KIB
    assert error.fitting_tokens == 37424  # 2339 pages; the 2340th is the null page
    for text in ("37424 tokens", "--max-model-len", "--kv-cache-memory", "--memory-utilization"):
        assert text in str(error)
    assert plan(LLAMA_LIKE, 4 * GIB, max_model_len=37424).max_model_len == 37424
    with pytest.raises(CapacityError):
        plan(LLAMA_LIKE, 4 * GIB, max_model_len=37425)


@pytest.mark.parametrize("memory", [KIB, 1 << 61])
@pytest.mark.parametrize(("length", "lookahead"), [(10**6, 0), (10**11, 0), (10**6, 10**9), (10**6, 10**10)])
@pytest.mark.parametrize("layers", ["full", "full and window", "full and state", "state"])
def test_more_memory_is_asked_for_only_where_it_helps(layers, length, lookahead, memory):
    """Block tables number no more than 2^31 - 2 pages; what needs more of them fits nowhere."""
    layers = {
        name: spec
        for name, spec in {
            "full": FullAttentionSpec(1, 8, "bfloat16"),
            "window": SlidingWindowSpec(1, 8, "bfloat16", 1000),
            "state": StateSpec(((16,),), ("float32",)),
        }.items()
        if name in layers
    }
    _, error = plan_or_refusal(layers, memory, max_model_len=length, num_lookahead_tokens=lookahead)
    if error is None:
        return
    if "raise --kv-cache-memory" in str(error):
        assert error.have_bytes < error.need_bytes
        assert plan(layers, error.need_bytes, max_model_len=length, num_lookahead_tokens=lookahead)
    else:
        assert "block tables number 2147483646" in str(error)
        assert ("--num-speculative-tokens" if lookahead else "raise --block-size") in str(error)
        assert plan_or_refusal(layers, 1 << 61, max_model_len=length, num_lookahead_tokens=lookahead)[1]
    if error.fitting_tokens:
        assert plan(layers, memory, max_model_len=error.fitting_tokens, num_lookahead_tokens=lookahead)


def test_sliding_layers_are_billed_for_their_window_only():  # case 14
    layers = mixed(10, 50, window=1024, heads=2, head_size=64, dtype="float16")  # 512 bytes per token and layer
    with pytest.raises(CapacityError) as refusal:
        plan(layers, MIB, max_model_len=8192, max_num_batched_tokens=512)
    full, sliding = 8192 * 10 * 512, (1024 + 16) * 50 * 512
    assert full + sliding <= refusal.value.need_bytes <= (full + sliding) * 1.02
    as_full = {name: FullAttentionSpec(2, 64, "float16") for name in layers}
    with pytest.raises(CapacityError) as refusal:
        plan(as_full, MIB, max_model_len=8192)
    assert refusal.value.need_bytes == 240 * MIB + 60 * 16 * 512


def test_tokens_in_flight_are_not_billed_per_request():  # case 17
    layers = mixed(0, 4, window=4, block_size_multiple=4)
    needs = []
    for tokens_per_step in (1, 8192):
        with pytest.raises(CapacityError) as refusal:
            plan(layers, 1, max_model_len=8192, block_size=4, max_num_batched_tokens=tokens_per_step)
        needs.append(refusal.value.need_bytes)
    page = 4 * 4 * layers["model.layers.0.self_attn"].page_size_bytes(1)
    assert needs == [3 * page, 3 * page]  # two blocks and the null page, not 2050


@pytest.mark.parametrize(
    ("counts", "num_groups"),
    [((19, 18), 2), ((20, 30), 2), ((10, 16), 2), ((17, 12), 2), ((36, 1), 2), ((3, 15), 2), ((32, 0), 1)],
)
@pytest.mark.parametrize("memory", [4 * GIB, 40 * GIB])
def test_uneven_layer_counts_waste_little_without_many_groups(counts, num_groups, memory):  # cases 25 and 26
    config = plan(mixed(*counts, heads=2, head_size=128), memory, max_model_len=8192)
    assert len(config.groups) == num_groups
    assert max(group_waste(config, memory)) < 0.05


def test_four_kinds_of_layers_share_one_pool():  # case 26: (30, 10, 1, 1)
    layers = mixed(30, 10) | {
        "b": SlidingWindowSpec(1, 256, "bfloat16", 64),
        "c": SlidingWindowSpec(1, 256, "bfloat16", 32),
    }
    config = plan(layers, 8 * GIB, max_model_len=8192)
    assert len(config.groups) == 4
    assert max(group_waste(config, 8 * GIB)) < 0.05


def test_more_full_layers_change_the_plan_smoothly():  # case 27: no ratio at which start-up breaks
    waste = []
    for extra in range(9):
        config = plan(mixed(13 + extra, 12), 8 * GIB, max_model_len=8192)
        assert len(config.groups) == 2
        waste.append(max(group_waste(config, 8 * GIB)))
    assert max(waste) < 0.05


@pytest.mark.parametrize(("length", "num_groups"), [(511, 1), (512, 1), (513, 2)])
def test_a_window_that_cannot_slide_forks_no_second_group(length, num_groups):  # case 30
    assert len(plan(mixed(3, 15), GIB, max_model_len=length).groups) == num_groups


def test_auto_merges_windows_by_the_length_it_solved():
    config = plan(mixed(3, 15), 6 * MIB, max_model_len="auto", model_limit=32768)
    assert config.max_model_len < 512
    assert len(config.groups) == 1 or request_fits(config, config.max_model_len)


def test_a_tight_pool_gets_smaller_pages_when_that_holds_more():
    config = plan(mixed(3, 15), 5 * MIB, max_model_len=272)
    check_plan(config, mixed(3, 15), 5 * MIB)
    big = plan(mixed(3, 15), GIB, max_model_len=4096)
    assert [len(group.layers) for group in big.groups] == [15, 3]


def test_a_pool_too_small_to_share_well_is_used_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        config = plan(mixed(10, 13), 20 * MIB, max_model_len=800)
    assert len(config.groups) > 1
    assert "more memory helps (--kv-cache-memory or --memory-utilization)" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        plan(mixed(3, 15), GIB, max_model_len=4096)
    assert not caplog.records


def test_the_issue_s_example():
    config = plan(mixed(3, 15), 512 * MIB, max_model_len="auto", model_limit=32768)
    assert [(len(group.layers), group.block_size) for group in config.groups] == [(15, 16), (3, 16)]
    assert config.max_model_len == 32768
    assert max(group_waste(config, 512 * MIB)) < 0.02


def test_a_model_without_caches_has_an_empty_plan():  # case 105
    config = plan({}, -5, max_model_len="auto", model_limit=100)
    assert (config.groups, config.total_bytes, config.max_model_len) == ((), 0, 100)
    assert config.describe() == "no KV cache; requests up to 100 tokens"
    assert KVCacheConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize("memory", [20 * MIB, GIB, 40 * GIB])
@pytest.mark.parametrize("count", [100, 1000])
def test_planning_many_layers_takes_seconds_at_most(count, memory):  # case 106
    layers = mixed(count * 2 // 5, count * 3 // 5)
    start = time.process_time()
    try:
        plan(layers, memory, max_model_len="auto", model_limit=131072)
    except CapacityError:
        assert memory < GIB
    assert time.process_time() - start < 5  # a tenth of a second, where the tests around it left a small heap


def test_every_worker_needs_specs_and_memory():
    with pytest.raises(PlanError, match="2 workers and memory of 1"):
        get_kv_cache_configs([mixed(1, 1)] * 2, [GIB], max_model_len=99)
    with pytest.raises(PlanError, match="0 workers and memory of 0"):
        get_kv_cache_configs([], [], max_model_len=99)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": "auto"}, "needs the model's own limit"),
        ({"max_model_len": "4096"}, "whole number"),
        ({"max_model_len": 0}, "whole number"),
        ({"max_model_len": True}, "whole number"),
        ({"max_model_len": 4097, "model_limit": 4096}, r"longer than the model's own limit of 4096.*--max-model-len"),
    ],
)
def test_a_length_that_makes_no_sense_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        plan(mixed(1, 1), GIB, **options)


def test_a_block_size_the_backend_does_not_take_is_refused():
    with pytest.raises(PlanError, match="--block-size"):
        plan(mixed(1, 1), GIB, max_model_len=4096, block_size=24)
