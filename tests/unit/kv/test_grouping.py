"""Layers become groups by what they keep, and share one block size."""

import pytest

from girih.errors import PlanError
from girih.kv import FullAttentionSpec, SlidingWindowSpec
from girih.kv.grouping import common_block_size, group_layers

FULL = FullAttentionSpec(1, 64, "float32")


def window(size, **options):
    return SlidingWindowSpec(1, 64, "float32", size, **options)


def names(groups):
    return [[name for name, _ in group.layers] for group in groups]


def test_groups_come_in_the_order_in_which_the_model_first_has_them():
    layers = {"a": window(8), "b": FULL, "c": window(8), "d": window(16), "e": FULL}
    assert names(group_layers(layers, 4096)) == [["a", "c"], ["b", "e"], ["d"]]


def test_layers_of_different_bytes_that_keep_the_same_tokens_are_one_group():
    layers = {"a": FULL, "b": FullAttentionSpec(8, 128, "int8")}
    assert len(group_layers(layers, 4096)) == 1


@pytest.mark.parametrize(("limit", "count"), [(511, 1), (512, 1), (513, 2)])
def test_a_window_that_no_request_outgrows_joins_full_attention(limit, count):  # case 30
    assert len(group_layers({"a": FULL, "b": window(512)}, limit)) == count


def test_full_and_sliding_layers_are_never_one_group_while_the_window_can_slide():  # case 32
    full, sliding = group_layers({"a": FULL, "b": window(8)}, 32)
    assert full.retention != sliding.retention
    assert sliding.layers[0][1].sliding_window == 8  # the window stays with the layer, storage with the group


def test_a_group_splits_into_equal_pieces_in_order():
    (group,) = group_layers({str(i): FULL for i in range(6)}, 4096)
    assert names(group.split(3)) == [["0", "1"], ["2", "3"], ["4", "5"]]


@pytest.mark.parametrize(
    ("multiples", "block_size"), [((1,), 16), ((16,), 16), ((32, 16), 32), ((24,), 48), ((3,), 48)]
)
def test_the_block_size_is_the_smallest_multiple_of_16_that_every_backend_takes(multiples, block_size):
    layers = [window(8, block_size_multiple=multiple) for multiple in multiples]
    assert common_block_size(layers, None) == block_size


def test_a_block_size_asked_for_is_taken_if_the_backends_do():
    assert common_block_size([window(8, block_size_multiple=1)], 4) == 4
    with pytest.raises(PlanError, match=r"block size 4 .* multiples of 16.*--block-size"):
        common_block_size([window(8)], 4)
