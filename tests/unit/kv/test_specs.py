"""Every kind of spec: exact values, and what is refused. Rules that all kinds keep are in tests/conformance."""

import pytest

from girih.errors import ConfigError, PlanError
from girih.kv import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SharedCacheSpec,
    SlidingWindowSpec,
    StateSpec,
    specs,
)
from girih.kv.specs.chunked_local import ChunkedLocalRetention
from girih.kv.specs.cross_attention import CrossAttentionRetention
from girih.kv.specs.full_attention import FullAttentionRetention
from girih.kv.specs.sliding_window import SlidingWindowRetention
from girih.kv.specs.state import StateRetention

# Mamba 2 of Granite 4 tiny: 48 heads of 64, 128 states, one group of B and C, a convolution over 4 tokens
MAMBA2 = StateSpec(((3328, 3), (48, 64, 128)), ("bfloat16", "float32"), (((3072, 48), (256, 1)), ((48, 48),)))


# ---- bytes


def test_a_page_is_keys_then_values():
    spec = FullAttentionSpec(2, 64, "bfloat16")
    key, value = spec.view(16)
    assert (key.name, key.offset_bytes, key.shape) == ("key", 0, (16, 2, 64))
    assert (value.name, value.offset_bytes, value.shape) == ("value", 4096, (16, 2, 64))
    assert spec.page_size_bytes(16) == 8192


def test_keys_and_values_start_aligned_for_odd_shapes():
    _, value = FullAttentionSpec(1, 7, "uint8").view(3)
    assert value.offset_bytes == 32  # 21 bytes of keys, rounded up to 16
    assert FullAttentionSpec(1, 7, "uint8").page_size_bytes(3) == 64


def test_int8_pages_end_with_a_float32_scale_per_token_and_head():
    spec = FullAttentionSpec(2, 64, "int8")
    places = [(view.name, view.offset_bytes, view.shape, view.dtype) for view in spec.view(16)]
    assert places == [
        ("key", 0, (16, 2, 64), "int8"),
        ("value", 2048, (16, 2, 64), "int8"),
        ("key_scale", 4096, (16, 2), "float32"),
        ("value_scale", 4224, (16, 2), "float32"),
    ]
    assert spec.page_size_bytes(16) == 4352


def test_values_may_be_smaller_than_keys():
    key, value = FullAttentionSpec(2, 192, "bfloat16", 128).view(16)
    assert (key.shape, value.shape) == ((16, 2, 192), (16, 2, 128))
    assert FullAttentionSpec(2, 192, "bfloat16", 128) == FullAttentionSpec(2, 192, "bfloat16", v_head_size=128)
    assert SlidingWindowSpec(2, 192, "bfloat16", 512, v_head_size=128).page_size_bytes(16) == 16 * 2 * 320 * 2


def test_a_latent_vector_is_one_per_token_for_all_heads():
    (latent,) = MLAAttentionSpec(576, "bfloat16").view(16)
    assert (latent.name, latent.shape) == ("latent", (16, 576))
    latent, scale = MLAAttentionSpec(576, "int8").view(16)
    assert (scale.name, scale.offset_bytes, scale.shape, scale.dtype) == ("latent_scale", 9216, (16,), "float32")


def test_a_state_is_its_tensors_whatever_the_block_size():
    conv, ssm = MAMBA2.view(16)
    assert (conv.name, conv.shape, conv.dtype) == ("state_0", (3328, 3), "bfloat16")
    assert (ssm.name, ssm.offset_bytes, ssm.shape, ssm.dtype) == ("state_1", 19968, (48, 64, 128), "float32")
    assert MAMBA2.page_size_bytes(16) == MAMBA2.page_size_bytes(1024) == 19968 + 4 * 48 * 64 * 128


def test_a_reader_costs_nothing_and_sees_the_owner_s_tensors():
    inner = FullAttentionSpec(2, 64, "bfloat16", block_size_multiple=64)
    reader = SharedCacheSpec("layers.3", inner)
    assert reader.page_size_bytes(64) == 0
    assert reader.view(64) == inner.view(64)
    assert reader.block_size_multiple == 64


# ---- ranks


@pytest.mark.parametrize(
    ("heads", "ranks", "each"),
    [(8, 1, 8), (8, 2, 4), (8, 8, 1), (8, 16, 1), (8, 32, 1), (4, 2, 2), (4, 8, 1), (4, 12, 1), (1, 3, 1), (1, 6, 1)],
)
def test_a_rank_has_its_share_of_the_heads_or_one_that_others_have_too(heads, ranks, each):  # case 95
    for spec in (
        FullAttentionSpec(heads, 64, "int8", 32),
        SlidingWindowSpec(heads, 64, "bfloat16", 512),
        ChunkedLocalAttentionSpec(heads, 64, "bfloat16", 8192),
        CrossAttentionSpec(heads, 64, "bfloat16", 1500),
    ):
        assert spec.shard(ranks).num_kv_heads == each
        assert SharedCacheSpec("a", spec).shard(ranks) == SharedCacheSpec("a", spec.shard(ranks))


@pytest.mark.parametrize(("heads", "ranks"), [(8, 3), (8, 6), (4, 3), (4, 6), (8, 12)])
def test_ranks_that_cannot_share_the_heads_are_refused(heads, ranks):  # case 95
    with pytest.raises(PlanError, match=f"{heads} key/value heads .* {ranks} tensor-parallel .*divides {heads}, or a"):
        FullAttentionSpec(heads, 64, "bfloat16").shard(ranks)


@pytest.mark.parametrize("ranks", range(1, 33))
def test_every_rank_has_the_whole_latent_vector(ranks):  # case 95
    assert MLAAttentionSpec(576, "bfloat16").shard(ranks) == MLAAttentionSpec(576, "bfloat16")


def test_each_segment_of_a_state_is_shared_by_its_own_heads():
    mine = MAMBA2.shard(4)
    assert mine.shapes == ((768 + 256, 3), (12, 64, 128))  # the one group of B and C is on every rank
    assert mine.segments == (((768, 12), (256, 1)), ((12, 12),))
    # 16 key heads and 32 value heads: 32 ranks have one value head each, two share a key head
    delta = StateSpec(((8192, 3), (32, 128, 128)), ("bfloat16",) * 2, (((4096, 32), (4096, 32)), ((32, 32),)))
    assert delta.shard(32).shapes == ((256, 3), (1, 128, 128))
    with pytest.raises(PlanError, match="48 state heads"):
        MAMBA2.shard(5)


def test_the_first_axis_of_a_state_is_heads_if_nothing_else_is_said():
    assert StateSpec(((8, 3),), ("float32",)).shard(4).shapes == ((2, 3),)


# ---- tokens


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


def test_a_step_keeps_what_its_first_token_reads():
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


def test_chunked_attention_forgets_a_chunk_when_the_next_begins():
    chunks = ChunkedLocalRetention(8)
    assert chunks.live_range(7, 1, 4) == (0, 2)
    assert chunks.live_range(8, 1, 4) == (2, 3)
    assert chunks.live_range(6, 5, 4) == (0, 3)  # a step keeps what its first token reads
    assert (chunks.blocks_held(100, 4), chunks.peak_blocks(100, 4)) == (2, 2)
    assert ChunkedLocalAttentionSpec(1, 8, "float32", 8).retention_key(8) == FullAttentionRetention()


@pytest.mark.parametrize("chunk", [1, 3, 5, 7, 15, 16, 17, 31])
@pytest.mark.parametrize("lookahead", [0, 2, 19])
def test_chunks_that_do_not_suit_the_blocks_are_counted_exactly(chunk, lookahead):
    retention = ChunkedLocalRetention(chunk)
    held = peak = 0
    for end in range(1, 300):
        for start in range((end - 1) // 16 * 16, end):
            first, last = retention.live_range(start, end - start, 16, lookahead)
            peak = max(peak, last - first)
        held = max(held, last - first)
        assert (retention.blocks_held(end, 16, lookahead), retention.peak_blocks(end, 16, lookahead)) == (held, peak)


def test_a_state_is_one_and_one_more_for_each_draft_token():
    retention = MAMBA2.retention_key(1 << 40)
    assert retention == StateRetention()
    assert retention.live_range(5000, 1, 16, 3) == (0, 4)
    assert retention.blocks_held(10**6, 16, 3) == retention.peak_blocks(1, 16, 3) == 4
    assert retention.table_width(10**6, 16, 3) == 4


@pytest.mark.parametrize(("num_tokens", "unit"), [(0, 0), (1, 0), (16, 0), (17, 1), (32, 1), (40, 2)])
def test_a_state_is_found_by_the_last_unit_of_the_prefix(num_tokens, unit):
    assert StateRetention().hit_first(num_tokens, 16) == unit


@pytest.mark.parametrize("tokens", [1, 448, 8192])
def test_cross_attention_is_as_long_as_the_encoder_says(tokens):  # case 20
    retention = CrossAttentionSpec(6, 64, "float16", 1500).retention_key(limit=448)
    assert retention == CrossAttentionRetention(1500)
    assert retention.blocks_held(tokens, 16) == retention.peak_blocks(tokens, 16) == 94
    assert retention.live_range(0, tokens, 16) == (0, 94)
    assert not retention.prefix_cacheable


def test_a_latent_window_keeps_tokens_like_any_other_window():
    spec = MLAAttentionSpec(512, "bfloat16", sliding_window=128)
    assert spec.retention_key(4096) == SlidingWindowSpec(8, 64, "float32", 128).retention_key(4096)
    assert spec.retention_key(128) == MLAAttentionSpec(512, "bfloat16").retention_key(128) == FullAttentionRetention()


def test_layers_that_read_a_token_ahead_keep_tokens_apart():
    ahead = FullAttentionSpec(1, 64, "float32", hit_trim_tokens=1).retention_key(99)
    assert ahead == FullAttentionRetention(hit_trim_tokens=1) != FullAttentionRetention()
    assert MLAAttentionSpec(8, "float32", hit_trim_tokens=1).retention_key(99) == ahead
    assert ahead.describe() == "full attention, 1 token ahead"


@pytest.mark.parametrize(
    ("owner", "reader", "covers"),
    [
        (FullAttentionRetention(), SlidingWindowRetention(9), True),
        (FullAttentionRetention(), ChunkedLocalRetention(9), True),
        (FullAttentionRetention(), FullAttentionRetention(hit_trim_tokens=1), False),
        (FullAttentionRetention(), StateRetention(), False),
        (FullAttentionRetention(), CrossAttentionRetention(9), False),
        (SlidingWindowRetention(9), SlidingWindowRetention(8), True),
        (SlidingWindowRetention(9), SlidingWindowRetention(10), False),
        (SlidingWindowRetention(9), FullAttentionRetention(), False),
        (ChunkedLocalRetention(9), SlidingWindowRetention(9), False),
    ],
)
def test_a_reader_needs_an_owner_that_keeps_as_much(owner, reader, covers):
    assert owner.covers(reader) == covers


# ---- what is refused


@pytest.mark.parametrize("arguments", [(0, 64, "float32"), (1, 0, "float32"), (-1, 64, "float32")])
def test_sizes_below_one_are_refused_by_name(arguments):
    with pytest.raises(PlanError, match="must be at least 1"):
        FullAttentionSpec(*arguments)


def test_a_window_below_one_is_refused():
    with pytest.raises(PlanError, match="sliding_window=0"):
        SlidingWindowSpec(1, 64, "float32", 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FullAttentionSpec(1, 64, "float32", 0), "full_attention: v_head_size=0 must be at least 1"),
        (lambda: FullAttentionSpec(1, 64, "float32", hit_trim_tokens=-1), "hit_trim_tokens=-1 must be at least 0"),
        (lambda: FullAttentionSpec(1, 64, "float32", block_size_multiple=0), "block_size_multiple=0"),
        (lambda: ChunkedLocalAttentionSpec(1, 64, "float32", 0), "attention_chunk_size=0"),
        (lambda: CrossAttentionSpec(1, 64, "float32", 0), "num_encoder_tokens=0"),
        (lambda: MLAAttentionSpec(0, "float32"), "latent_size=0"),
        (lambda: MLAAttentionSpec(8, "float32", sliding_window=0), "sliding_window=0"),
        (lambda: MLAAttentionSpec(8, "float32", hit_trim_tokens=-1), "hit_trim_tokens=-1"),
        (lambda: StateSpec((), ()), "0 shapes and 0 dtypes"),
        (lambda: StateSpec(((3, 4),), ()), "1 shapes and 0 dtypes"),
        (lambda: StateSpec(((3, 0),), ("float32",)), "sizes of at least 1"),
        (lambda: StateSpec(((3, 4),), ("float32",), (((2, 1),),)), "do not make up the first axis"),
        (lambda: StateSpec(((3, 4),), ("float32",), (((3, 2),),)), "do not make up the first axis"),
        (lambda: StateSpec(((3, 4),), ("float32",), (((3, 3),), ((3, 3),))), "segments of 2 tensors and 1 shapes"),
    ],
)
def test_fields_that_make_no_sense_are_refused_by_name(make, message):
    with pytest.raises(PlanError, match=message):
        make()


@pytest.mark.parametrize("make", [lambda: MLAAttentionSpec(8, "fp99"), lambda: StateSpec(((3, 4),), ("fp99",))])
def test_every_kind_knows_the_dtypes(make):
    with pytest.raises(ConfigError, match="unknown dtype 'fp99'"):
        make()


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


def test_json_of_a_retention_that_is_no_kind_of_its_own_is_refused():
    with pytest.raises(PlanError, match="there is no cache retention 'mla'"):
        specs.retention_from_json({"kind": "mla"})
