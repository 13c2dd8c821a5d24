"""The finished plan as data: JSON, words, and one per stage class."""

from dataclasses import replace

import pytest
from planner_models import cut, every, mixed, plan

from girih.errors import PlanError
from girih.kv import FullAttentionSpec, KVCacheConfig, SharedCacheSpec, StateSpec, get_kv_cache_configs
from girih.kv.config import one_per_class
from girih.units import GIB

STATE = StateSpec(((64, 3),), ("float32",))


def two_classes():
    full = FullAttentionSpec(1, 64, "float32")
    return get_kv_cache_configs(cut({"a": full, "b": STATE, "c": full}, [1, 2]), [GIB, GIB], max_model_len=99)


def test_a_plan_describes_itself_in_a_line_per_group():
    text = plan(mixed(3, 15), GIB, max_model_len=4096).describe()
    pool, sliding, full = text.splitlines()
    assert "requests up to 4096 tokens" in pool
    assert sliding.startswith("group 0: sliding window 512, 15 layers, blocks of 16 tokens, pages of 240.00 KiB")
    assert full.startswith("group 1: full attention, 3 layers")


def test_groups_are_numbered_through_over_the_classes():
    _, second = two_classes()
    assert [line.split(":")[0] for line in second.describe().splitlines()[1:]] == ["group 1", "group 2"]


def test_a_plan_goes_to_json_and_back():
    full = FullAttentionSpec(1, 64, "int8", 32)
    layers = every(3, 9, full, STATE) | {"r": SharedCacheSpec("layers.8", full)}
    config = plan(layers, GIB, max_model_len=4096, num_lookahead_tokens=2)
    assert KVCacheConfig.from_json(config.to_json()) == config
    assert all(KVCacheConfig.from_json(item.to_json()) == item for item in two_classes())


def test_json_that_is_no_plan_is_refused():
    data = plan(mixed(1, 1), GIB, max_model_len=4096).to_json()
    del data["num_slabs"]
    with pytest.raises(PlanError, match="num_slabs"):
        KVCacheConfig.from_json(data)


def test_one_plan_stands_for_each_class_by_its_number():
    first, second = two_classes()
    assert one_per_class([second, first, second]) == (first, second)
    assert one_per_class([first]) == (first,)


def test_within_a_class_bytes_may_differ_and_nothing_else():
    config = plan(mixed(3, 15), GIB, max_model_len=4096)
    other = replace(config, slab_bytes=2 * config.slab_bytes)
    assert one_per_class([config, other]) == (config,)
    wider = tuple(replace(group, pages_per_slab=2 * group.pages_per_slab) for group in config.groups)
    for wrong in (
        replace(config, num_slabs=config.num_slabs - 1),
        replace(config, groups=wider),
        replace(config, groups=config.groups[:1]),
        replace(config, max_model_len=4095),
        replace(config, first_group=1),
    ):
        with pytest.raises(PlanError, match="plans of stage class 0"):
            one_per_class([config, wrong])
