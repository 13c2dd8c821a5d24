"""Plans for several workers: stage classes, unequal memory, and one length that fits everywhere."""

import itertools
import logging

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from planner_models import check_plan, check_plans, cut, every, mixed, plan

from girih.errors import CapacityError
from girih.kv import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    StateSpec,
    get_kv_cache_configs,
)
from girih.kv.capacity import max_request_tokens, num_concurrent_requests, request_fits
from girih.kv.config import one_per_class
from girih.kv.layout import Load, score
from girih.units import GIB, MIB

FULL = FullAttentionSpec(2, 256, "bfloat16")
WINDOW = SlidingWindowSpec(2, 128, "bfloat16", 512)
STATE = StateSpec(((8192, 3), (32, 128, 128)), ("bfloat16", "float32"))


def plan_all(specs, memory, **options):
    memory = [memory] * len(specs) if isinstance(memory, int) else memory
    configs = get_kv_cache_configs(specs, memory, **{"max_model_len": 8192, **options})
    check_plans(configs, specs, memory)
    return configs


def classes_of(configs):
    return [config.stage_class for config in configs]


# ---- ranks of one stage


def test_all_ranks_of_a_stage_have_one_plan_for_the_least_memory():
    layers = mixed(3, 15)
    configs = plan_all([layers] * 4, [2 * GIB, GIB, 3 * GIB, 2 * GIB])
    assert len(set(map(id, configs))) == 1
    assert configs[0] == plan(layers, GIB, max_model_len=8192)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16, 32])
def test_ranks_plan_their_share_of_every_kind(ranks):  # case 95
    layers = every(4, 12, FULL, StateSpec(((64, 3), (32, 16)), ("bfloat16",) * 2)) | {
        "m": MLAAttentionSpec(576, "int8")
    }
    sharded = {name: spec.shard(ranks) for name, spec in layers.items()}
    config = plan_all([sharded] * ranks, 64 * MIB)[0]
    assert len(config.groups) == 2
    assert config.groups[1].layers[0].spec.num_kv_heads == max(1, 2 // ranks)


# ---- pipeline stages


def test_stages_with_one_kind_of_layer_each_are_classes_of_their_own():  # case 90
    specs = cut({f"l{i}": STATE for i in range(3)} | {"l3": MLAAttentionSpec(576, "bfloat16")}, [3, 1])
    configs = plan_all(specs, GIB)
    assert classes_of(configs) == [0, 1]
    assert [config.first_group for config in configs] == [0, 1]
    assert [[group.block_size for group in config.groups] for config in configs] == [[16], [16]]
    assert configs[0].groups[0].retention.holds_state
    assert not configs[1].groups[0].retention.holds_state


def test_each_worker_s_plan_names_its_own_layers_only():  # case 92
    layers = every(4, 60, FULL, WINDOW)
    configs = plan_all(cut(layers, [20, 20, 20]), GIB)
    assert classes_of(configs) == [0, 0, 0]  # five full and fifteen sliding ones each
    names = [[name for group in config.groups for name in group.layer_names] for config in configs]
    assert sorted(itertools.chain(*names)) == sorted(layers)
    assert {group.retention for group in configs[0].groups} == {group.retention for group in configs[2].groups}
    assert [group.page_stride_bytes for group in configs[0].groups] == [g.page_stride_bytes for g in configs[1].groups]


def test_stages_that_have_the_kinds_in_another_order_have_the_groups_in_one():  # cases 92 and 93
    first = {"a.0": FULL, "a.1": WINDOW, "a.2": WINDOW}
    second = {"b.0": WINDOW, "b.1": FULL, "b.2": WINDOW}
    configs = plan_all([first, second], GIB)
    assert classes_of(configs) == [0, 0]
    assert [group.layer_names for group in configs[0].groups] == [("a.0",), ("a.1", "a.2")]
    assert [group.layer_names for group in configs[1].groups] == [("b.1",), ("b.0", "b.2")]


def test_uneven_stages_have_as_many_groups_each_and_no_padding():  # case 93: 10 full + 11 sliding | 11 full + 10
    layers = {f"l{i}": FULL if i % 2 else WINDOW for i in range(42)}
    specs = cut(layers, [21, 21])
    configs = plan_all(specs, 40 * GIB)
    counts = [[len(group.layers) for group in config.groups] for config in configs]
    assert sorted(counts[0]) == sorted(counts[1]) == [10, 11]
    for config in configs:
        assert score(config, 40 * GIB, Load.up_to(8192, 8)) >= 0.97


def test_any_split_of_a_hybrid_model_is_planned_without_loss():  # case 23
    counts = [7, 7, 7, 3, 3, 3, 3, 3, 3, 3, 3, 3]
    specs = cut(every(4, 48, FULL, STATE), counts)
    configs = plan_all(specs, 8 * GIB, max_model_len=32768)
    assert [len(config.groups) for config in configs] == [len(set(layers.values())) for layers in specs]
    for config in configs:
        assert score(config, 8 * GIB, Load.up_to(32768, 8)) >= 0.97
    # stages that are alike share a class: one of 1 + 6, of 2 + 5, of 1 + 2, of states alone
    assert len(set(classes_of(configs))) == 4


@settings(max_examples=25, deadline=None)
@given(
    kinds=st.lists(st.sampled_from([FULL, WINDOW, STATE, MLAAttentionSpec(64, "bfloat16")]), min_size=1, max_size=24),
    cuts=st.lists(st.integers(0, 24), max_size=5),
    memory=st.lists(st.integers(256 * MIB, 1 << 33), min_size=6, max_size=6),
    max_model_len=st.sampled_from(["auto", 100, 4096]),
    lookahead=st.sampled_from([0, 2]),
)
def test_any_split_in_any_memory_gives_plans_that_agree(kinds, cuts, memory, max_model_len, lookahead):
    layers = {f"l{i}": spec for i, spec in enumerate(kinds)}
    ends = sorted({min(cut, len(kinds)) for cut in cuts} | {len(kinds)})
    specs = cut(layers, [end - start for start, end in itertools.pairwise([0, *ends])])
    options = {"max_model_len": max_model_len, "model_limit": 8192, "num_lookahead_tokens": lookahead}
    memory = memory[: len(specs)]
    try:
        configs = plan_all(specs, memory, **options)
    except CapacityError as refused:
        least = memory.index(refused.have_bytes)
        with pytest.raises(CapacityError):
            plan(specs[least], memory[least], **options)
        return
    for config, layers, num_bytes in zip(configs, specs, memory, strict=True):
        assert plan(layers, num_bytes, **options).max_model_len >= 0.97 * config.max_model_len


# ---- stage classes


def test_one_class_serves_stages_whose_pages_differ_but_fit_a_slab_alike():
    # 16 layers of 16 heads and 4 of 4 keep the same proportion of full and sliding
    small = every(4, 8, FullAttentionSpec(2, 64, "bfloat16"), SlidingWindowSpec(2, 64, "bfloat16", 512))
    large = {f"b.{n}": spec for n, spec in every(4, 16, FULL, SlidingWindowSpec(2, 256, "bfloat16", 512)).items()}
    configs = plan_all([small, large], [GIB, 9 * GIB])
    assert classes_of(configs) == [0, 0]
    first, second = configs
    assert (first.num_slabs, second.num_slabs) == (first.num_slabs,) * 2
    assert [g.pages_per_slab for g in first.groups] == [g.pages_per_slab for g in second.groups]
    assert second.slab_bytes == 8 * first.slab_bytes


def test_stages_that_would_lose_more_than_a_percent_stay_apart():
    specs = cut({"a": FULL, "b": STATE, "c": FULL, "d": FULL, "e": FULL, "f": STATE}, [2, 4])
    configs = plan_all(specs, 8 * GIB)
    assert classes_of(configs) == [0, 1]
    assert [config.first_group for config in configs] == [0, 2]
    first, second = ({group.key for group in config.groups} for config in configs)
    assert first == second


def test_a_class_keeps_99_percent_of_what_each_stage_could_have_alone():
    specs = [
        {f"{stage}.{i}": FULL if i < fulls else WINDOW for i in range(12)} for stage, fulls in enumerate((5, 6, 4, 5))
    ]
    configs = plan_all(specs, 40 * GIB)
    for config, layers in zip(configs, specs, strict=True):
        load = Load.up_to(8192, 8)
        assert score(config, 40 * GIB, load) >= 0.985 * score(
            plan(layers, 40 * GIB, max_model_len=8192), 40 * GIB, load
        )


def test_a_stage_without_caches_has_no_pool_and_fits_in_no_memory():  # case 105
    specs = [{"a": FULL}, {}, {"c": STATE}, {}]
    configs = plan_all(specs, [GIB, -5, GIB, 0])
    assert classes_of(configs) == [0, 1, 2, 1]
    assert [config.first_group for config in configs] == [0, 1, 1, 1]
    assert (configs[1].groups, configs[1].total_bytes, configs[1].max_model_len) == ((), 0, 8192)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_model_without_any_cache_is_legal_on_any_number_of_workers(num_workers):  # case 105
    configs = plan_all([{}] * num_workers, -7, max_model_len="auto", model_limit=123)
    assert {config.max_model_len for config in configs} == {123}


def test_a_model_of_states_alone_is_limited_by_its_model_only():  # case 105
    config = plan_all([{f"l{i}": STATE for i in range(24)}], GIB, max_model_len="auto", model_limit=1 << 20)[0]
    assert config.max_model_len == 1 << 20
    assert num_concurrent_requests(config, 1 << 20) == config.num_slabs * config.groups[0].pages_per_slab >= 18


# ---- memory and lengths


def test_the_worker_with_least_memory_decides_and_is_named():  # case 5
    layers = mixed(3, 15)
    first, second = plan_all([layers, layers], [2 * GIB, GIB], max_model_len=4096)
    assert first == second
    assert GIB - 2 * first.slab_bytes < first.total_bytes <= GIB
    with pytest.raises(CapacityError, match=r"worker 1 has 0 B \(everything else overdraws .* by 3.86 GiB") as refusal:
        get_kv_cache_configs([layers, layers], [int(9.9 * GIB), int(-3.86 * GIB)], max_model_len=4096)
    assert refusal.value.fitting_tokens is None


def test_a_request_must_fit_on_every_stage_and_the_tightest_is_named():
    specs = cut(every(1, 8, FULL, FULL), [2, 6])  # 64 and 192 KiB for 16 tokens
    memory = [65 * MIB, 65 * MIB]
    auto = plan_all(specs, memory, max_model_len="auto", model_limit=10**6)
    assert {config.max_model_len for config in auto} == {5520}  # 346 pages of the larger stage, one of them null
    with pytest.raises(
        CapacityError, match=r"worker 1 has 65\.00 MiB; the longest request that fits has 5520"
    ) as refusal:
        plan_all(specs, memory, max_model_len=6000)
    assert (refusal.value.fitting_tokens, refusal.value.have_bytes) == (5520, 65 * MIB)
    assert refusal.value.need_bytes == (6000 // 16 + 1) * 192 * 1024
    plan_all(specs, memory, max_model_len=5520)


def test_the_length_is_solved_together_for_classes_with_different_costs():
    specs = [{"a": WINDOW, "b": STATE}, {"c": FULL}]
    configs = plan_all(specs, [64 * MIB, 8 * MIB], max_model_len="auto", model_limit=10**6)
    assert {config.max_model_len for config in configs} == {4080}  # the full layer alone: 255 pages of 32 KiB
    assert all(request_fits(config, 4080) for config in configs)
    assert max_request_tokens(configs[0]) == 4080


def test_spare_memory_of_one_worker_is_told_with_the_reason(caplog):
    with caplog.at_level(logging.WARNING):
        plan_all([mixed(3, 15)] * 3, [GIB, 2 * GIB, GIB])
    (record,) = caplog.records
    assert "worker 1 uses 1023" in record.getMessage()
    assert "because worker 0 has room for" in record.getMessage()
    assert "if that one gets more memory" in record.getMessage()
    caplog.clear()
    plan_all([mixed(3, 15)] * 3, [GIB, GIB + MIB, GIB])
    assert not caplog.records


def test_a_thousand_layers_on_128_workers_are_planned():  # case 106; takes well under a second
    layers = mixed(400, 600)
    for specs, length in (([layers] * 128, 104_016), (cut(layers, [8] * 104 + [7] * 24), 131_072)):
        configs = get_kv_cache_configs(specs, [40 * GIB] * 128, max_model_len="auto", model_limit=131_072)
        check_plan(configs[-1], specs[-1], 40 * GIB)
        assert len(configs) == 128
        assert {config.max_model_len for config in configs} == {length}
        assert len(one_per_class(configs)) <= 4
