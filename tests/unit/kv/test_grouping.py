"""Caches become groups by what they keep, each with its own block size."""

import pytest

from girih.errors import PlanError
from girih.kv import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, StateSpec
from girih.kv.grouping import group_layers
from girih.kv.sharing import find_caches

FULL = FullAttentionSpec(1, 64, "float32")
STATE = StateSpec(((3, 4),), ("float32",))


def window(size, **options):
    return SlidingWindowSpec(1, 64, "float32", size, **options)


def groups_of(layers, limit=4096, block_size=None):
    return group_layers(find_caches(layers), limit, block_size)


def names(groups):
    return [[cache.name for cache in group.caches] for group in groups]


def test_groups_come_in_the_order_in_which_the_model_first_has_them():
    layers = {"a": window(8), "b": FULL, "c": window(8), "d": window(16), "e": FULL}
    assert names(groups_of(layers)) == [["a", "c"], ["b", "e"], ["d"]]


def test_layers_of_different_bytes_that_keep_the_same_tokens_are_one_group():
    # case 24: MLA, its indexer and a dense draft are three geometries and one block table
    layers = {
        "a": FULL,
        "b": FullAttentionSpec(8, 128, "int8"),
        "c": MLAAttentionSpec(576, "bfloat16"),
        "d": MLAAttentionSpec(132, "uint8"),
        "draft.a": FullAttentionSpec(8, 128, "bfloat16"),
    }
    assert names(groups_of(layers)) == [list(layers)]


@pytest.mark.parametrize(("limit", "count"), [(511, 1), (512, 1), (513, 2)])
def test_a_window_that_no_request_outgrows_joins_full_attention(limit, count):  # case 30
    assert len(groups_of({"a": FULL, "b": window(512)}, limit)) == count


def test_full_and_sliding_layers_are_never_one_group_while_the_window_can_slide():  # case 32
    full, sliding = groups_of({"a": FULL, "b": window(8)}, 32)
    assert full.retention != sliding.retention
    assert sliding.caches[0].spec.sliding_window == 8  # the window stays with the layer, storage with the group


def test_a_group_splits_into_equal_pieces_in_order():
    (group,) = groups_of({str(i): FULL for i in range(6)})
    assert names(group.split(3)) == [["0", "1"], ["2", "3"], ["4", "5"]]


@pytest.mark.parametrize(
    ("multiples", "block_size"), [((1,), 16), ((16,), 16), ((32, 16), 32), ((24,), 48), ((3,), 48), ((48, 64), 192)]
)
def test_the_block_size_is_the_smallest_multiple_of_16_that_every_backend_takes(multiples, block_size):
    layers = {str(multiple): window(8, block_size_multiple=multiple) for multiple in multiples}
    assert [group.block_size for group in groups_of(layers)] == [block_size]


def test_each_group_has_the_block_size_of_its_own_layers():
    layers = {"a": FullAttentionSpec(1, 64, "float32", block_size_multiple=64), "b": window(8), "c": STATE}
    assert [group.block_size for group in groups_of(layers)] == [64, 16, 16]


def test_a_block_size_asked_for_is_taken_by_all_groups_that_keep_tokens():
    layers = {"a": window(8, block_size_multiple=1), "b": window(9, block_size_multiple=4), "c": STATE}
    assert [group.block_size for group in groups_of(layers, block_size=4)] == [4, 4, 16]


@pytest.mark.parametrize("block_size", [0, -16, 4, 24])
def test_a_block_size_that_a_backend_does_not_take_is_refused_by_layer(block_size):
    layers = {"a": window(8, block_size_multiple=1), "b": window(8), "c": STATE}
    if block_size < 1:
        layers["b"] = layers["a"]
    message = f"block size {block_size} .* layer '[ab]', which takes multiples of (16|1); set --block-size"
    with pytest.raises(PlanError, match=message):
        groups_of(layers, block_size=block_size)
