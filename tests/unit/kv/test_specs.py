"""Full attention and sliding windows: exact values, and what is refused."""

import pytest

from girih.errors import ConfigError, PlanError
from girih.kv import FullAttentionSpec, SlidingWindowSpec, specs
from girih.kv.specs.full_attention import FullAttentionRetention
from girih.kv.specs.sliding_window import SlidingWindowRetention


def test_a_page_is_keys_then_values():
    spec = FullAttentionSpec(2, 64, "bfloat16")
    key, value = spec.view(16)
    assert (key.name, key.offset_bytes, key.shape) == ("key", 0, (16, 2, 64))
    assert (value.name, value.offset_bytes, value.shape) == ("value", 4096, (16, 2, 64))
    assert spec.page_size_bytes(16) == 8192


def test_keys_and_values_start_aligned_for_odd_shapes():
    _, value = FullAttentionSpec(1, 7, "int8").view(3)
    assert value.offset_bytes == 32  # 21 bytes of keys, rounded up to 16
    assert FullAttentionSpec(1, 7, "int8").page_size_bytes(3) == 64


@pytest.mark.parametrize(
    ("limit", "slides"), [(511, False), (512, False), (513, True), (1 << 40, True)]
)  # case 30: a window of 512 that the longest request does not outgrow must not fork a second group
def test_a_window_that_reaches_the_limit_is_full_attention(limit, slides):
    retention = SlidingWindowSpec(1, 64, "float32", 512).retention_key(limit)
    assert retention == (SlidingWindowRetention(512) if slides else FullAttentionRetention())


def test_layers_with_one_window_share_a_key_whatever_their_bytes():
    small, large = SlidingWindowSpec(1, 64, "int8", 512), SlidingWindowSpec(8, 128, "float32", 512)
    assert small.retention_key(4096) == large.retention_key(4096)
    assert SlidingWindowSpec(1, 64, "int8", 513).retention_key(4096) != small.retention_key(4096)


def test_the_window_includes_the_token_itself():
    window = SlidingWindowRetention(4)
    # the query at 8 reads 5..8: with blocks of 4, the block of 4..7 and its own
    assert window.live_range(8, 1, 4) == (1, 3)
    # the query at 7 reads 4..7
    assert window.live_range(7, 1, 4) == (1, 2)
    # the query at 6 reads 3..6
    assert window.live_range(6, 1, 4) == (0, 2)


def test_a_chunk_keeps_what_its_first_token_reads():
    assert SlidingWindowRetention(4).live_range(8, 100, 4) == (1, 27)


def test_windows_slide_by_confirmed_tokens_not_by_drafts():
    without, with_drafts = (SlidingWindowRetention(4).live_range(8, 1, 4, drafts) for drafts in (0, 9))
    assert without[0] == with_drafts[0] == 1
    assert with_drafts[1] == 5


def test_a_window_of_one_needs_no_cached_block():
    retention = SlidingWindowRetention(1)
    assert retention.live_range(16, 1, 16) == (1, 2)
    assert retention.peak_blocks(1000, 16) == retention.blocks_held(1000, 16) == 1


def test_a_tiny_window_is_billed_for_what_it_holds_not_for_a_whole_step():  # case 17
    assert SlidingWindowRetention(4).peak_blocks(8192, 4) == 2


@pytest.mark.parametrize("arguments", [(0, 64, "float32"), (1, 0, "float32"), (-1, 64, "float32")])
def test_sizes_below_one_are_refused_by_name(arguments):
    with pytest.raises(PlanError, match="must be at least 1"):
        FullAttentionSpec(*arguments)


def test_a_window_below_one_is_refused():
    with pytest.raises(PlanError, match="sliding_window=0"):
        SlidingWindowSpec(1, 64, "float32", 0)


def test_an_unknown_dtype_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown dtype 'fp99'.*bfloat16"):
        FullAttentionSpec(1, 64, "fp99")


def test_json_of_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown cache spec 'ring'.*sliding_window"):
        specs.spec_from_json({"kind": "ring"})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, 'needs "kind"'),
        ({"kind": "full_attention", "num_kv_heads": 1, "colour": 2}, "has no colour"),
        ({"kind": "full_attention", "num_kv_heads": 1}, "head_size"),
    ],
)
def test_json_with_wrong_fields_is_refused(data, message):
    with pytest.raises(PlanError, match=message):
        specs.spec_from_json(data)
