"""Workers become stages: ranks agree, stages have nothing in common, stages that need the same are planned as one."""

import pickle

import pytest
from planner_models import cut, mixed

from girih.errors import PlanError
from girih.kv import FullAttentionSpec, SharedCacheSpec, get_kv_cache_configs
from girih.kv.stages import find_stages
from girih.units import GIB

FULL = FullAttentionSpec(2, 64, "bfloat16")


def workers(stages):
    return [list(stage.workers) for stage in stages]


def test_ranks_with_equal_layers_are_one_stage_and_the_least_decides():
    layers = mixed(2, 4)
    shuffled = dict(reversed(layers.items()))
    (stage,) = find_stages([layers, pickle.loads(pickle.dumps(layers)), shuffled], [30, 10, 20])
    assert stage.workers == (0, 1, 2)
    assert (stage.memory_bytes, stage.least_worker) == (10, 1)
    assert set(stage.layer_names) == {tuple(layers)}


def test_stages_come_in_the_order_of_their_first_workers():
    first, second = cut(mixed(1, 5), [1, 5])
    assert workers(find_stages([second, first, second], [1, 1, 1])) == [[0, 2], [1]]


def test_stages_that_need_the_same_are_planned_as_one_whatever_their_names():
    stages = cut(mixed(2, 4), [3, 3])
    (stage,) = find_stages([stages[0], stages[0], stages[1], stages[1]], [9, 9, 9, 8])
    assert stage.workers == (0, 1, 2, 3)
    assert [len(names) for names in stage.layer_names] == [3, 3, 3, 3]
    assert len(set(stage.layer_names)) == 2
    assert stage.least_worker == 3


def test_stages_without_caches_are_one():
    assert workers(find_stages([{}, {"a": FULL}, {}], [1, 1, 1])) == [[0, 2], [1]]


def test_ranks_that_differ_are_refused_by_layer_and_worker():
    layers = mixed(1, 1)
    name = "model.layers.1.self_attn"
    with pytest.raises(PlanError, match=f"worker 2 and worker 0 differ in layer '{name}': .*equal shares"):
        find_stages([layers, layers, layers | {name: FullAttentionSpec(9, 9, "int8")}], [1, 1, 1])
    with pytest.raises(PlanError, match="worker 3 and worker 1 differ in layer 'b'"):
        find_stages([{"a": FULL}, {"b": FULL}, {"a": FULL}, {"b": FullAttentionSpec(1, 64, "bfloat16")}], [1] * 4)


@pytest.mark.parametrize(
    ("first", "second", "alone"),
    [(["a", "b"], ["b", "c"], "worker 1 has layer 'c'|worker 0 has layer 'a'"), (["a", "b"], ["b"], "worker 0 has"),
     (["b"], ["a", "b"], "worker 1 has layer 'a'")],
)  # fmt: skip
def test_workers_with_some_layers_in_common_are_refused_by_name(first, second, alone):
    specs = [dict.fromkeys(names, FULL) for names in (first, second)]
    with pytest.raises(PlanError, match=f"worker 0 and worker 1 both have layer 'b', but of them only ({alone})"):
        find_stages(specs, [1, 1])


def test_a_cache_on_another_stage_cannot_be_read():
    specs = [{"a": FULL}, {"b": FULL, "c": SharedCacheSpec("a", FULL)}]
    message = r"layer 'c' on worker 1 reads the cache of layer 'a', which is on worker 0.*--pipeline-parallel-size"
    with pytest.raises(PlanError, match=message):
        get_kv_cache_configs(specs, [GIB, GIB], max_model_len=99)
    chain = [{"a": FULL}, {"b": SharedCacheSpec("c", FULL), "c": SharedCacheSpec("a", FULL)}]
    with pytest.raises(PlanError, match="layer 'c' on worker 1 reads the cache of layer 'a'"):
        find_stages(chain, [1, 1])
