"""Mixes of layers on which other planners crashed or wasted memory, each with its whole kind."""

import pytest
from planner_models import check_plan, every, mixed, plan

from girih.errors import CapacityError
from girih.kv import (
    CrossAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    StateSpec,
)
from girih.kv.capacity import num_concurrent_requests, peak_pages
from girih.kv.layout import Load, score
from girih.units import GIB, KIB, MIB


def usable(config, memory):
    return score(config, memory, Load.up_to(config.max_model_len, 8))


def state_of(num_bytes):
    return StateSpec(((num_bytes // 4,),), ("float32",))


def draft(layers):
    return {f"draft.{name}": spec for name, spec in layers.items()}


@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize("draft_share", [0.25, 1, 1.5, 2, 3])
def test_states_a_target_and_a_draft_of_any_page_size_share_a_pool(draft_share, lookahead):  # case 21
    target = FullAttentionSpec(8, 128, "bfloat16")  # 64 KiB for 16 tokens
    layers = every(4, 16, target, state_of(64 * KIB))
    layers |= draft({"layers.0": FullAttentionSpec(8, int(128 * draft_share), "bfloat16")})
    config = plan(layers, GIB, max_model_len=32768, num_lookahead_tokens=lookahead)
    check_plan(config, layers, GIB)
    assert len(config.groups) == 2  # target and draft keep the same tokens
    assert config.groups[0].page_size_bytes == 12 * 64 * KIB  # nothing is padded to another's page
    assert usable(config, GIB) >= 0.98


@pytest.mark.parametrize("window", [None, 512])
def test_one_byte_latents_float32_states_and_a_two_byte_draft_share_a_pool(window):  # case 24
    layers = every(
        4, 28, MLAAttentionSpec(576, "float8_e4m3fn"), StateSpec(((12288, 3), (32, 128, 128)), ("float32",) * 2)
    )
    dense = FullAttentionSpec(8, 128, "bfloat16")
    layers |= draft(
        {f"l{i}": dense if window is None else SlidingWindowSpec(8, 128, "bfloat16", window) for i in range(36)}
    )
    config = plan(layers, 40 * GIB, max_model_len=131072)
    check_plan(config, layers, 40 * GIB)
    assert len(config.groups) == (2 if window is None else 3)
    assert usable(config, 40 * GIB) >= 0.98
    with pytest.raises(CapacityError, match=r"needs .* there is 1\.00 MiB"):  # before any weight is read
        plan(layers, MIB, max_model_len=4096)


@pytest.mark.parametrize("latent", [512, 576, 40])
def test_latents_are_grouped_by_what_they_keep_not_by_their_type(latent):  # case 29
    layers = every(
        2, 12, MLAAttentionSpec(latent, "bfloat16"), MLAAttentionSpec(latent, "bfloat16", sliding_window=128)
    )
    config = plan(layers, GIB, max_model_len=32768)
    check_plan(config, layers, GIB)
    heads = every(
        2, 12, FullAttentionSpec(1, latent // 2, "bfloat16"), SlidingWindowSpec(1, latent // 2, "bfloat16", 128)
    )
    as_heads = plan(heads, GIB, max_model_len=32768)
    assert [group.retention for group in config.groups] == [group.retention for group in as_heads.groups]
    assert (config.num_slabs, config.slab_bytes) == (as_heads.num_slabs, as_heads.slab_bytes)
    assert [group.pages_per_slab for group in config.groups] == [1, 1]


@pytest.mark.parametrize("max_num_batched_tokens", [16, 8192])
@pytest.mark.parametrize("max_model_len", [64, 448, 4096])
@pytest.mark.parametrize("positions", [7, 1500, 3000])
def test_cross_attention_is_billed_by_the_encoder_alone(positions, max_model_len, max_num_batched_tokens):  # case 20
    layers = {"cross": CrossAttentionSpec(6, 64, "float16", positions), "self": FullAttentionSpec(6, 64, "float16")}
    options = {"max_model_len": max_model_len, "max_num_batched_tokens": max_num_batched_tokens}
    config = plan(layers, GIB, **options)
    check_plan(config, layers, GIB)
    cross, own = peak_pages(config.groups, max_model_len)
    assert (cross, own) == (-(-positions // 16), max_model_len // 16)
    page = 2 * 16 * 6 * 64 * 2
    with pytest.raises(CapacityError) as refusal:
        plan(layers, 1, **options)
    assert refusal.value.need_bytes == (cross + own + 1) * page


def test_a_draft_and_its_target_are_fitted_to_one_length():  # case 18
    target = {f"layers.{i}": FullAttentionSpec(8, 128, "bfloat16") for i in range(32)}
    both = target | draft({f"layers.{i}": FullAttentionSpec(8, 64, "bfloat16") for i in range(16)})
    memory = 20_000 * (32 * 4096 + 16 * 2048)
    config = plan(both, memory, max_model_len="auto", model_limit=262_144, num_lookahead_tokens=3)
    check_plan(config, both, memory)
    assert 19_900 < config.max_model_len <= 20_000
    assert len(config.groups) == 1
    assert plan(target, memory, max_model_len="auto", model_limit=262_144).max_model_len > 24_900


@pytest.mark.parametrize("lookahead", [0, 1, 5])
def test_draft_tokens_cost_a_state_each_and_room_behind_the_last_token(lookahead):
    layers = every(2, 8, FullAttentionSpec(1, 64, "bfloat16"), state_of(64 * KIB))
    config = plan(layers, 256 * MIB, max_model_len=1600, num_lookahead_tokens=lookahead)
    assert peak_pages(config.groups, 1600, lookahead) == [1 + lookahead, -(-(1600 + lookahead) // 16)]
    without = plan(layers, 256 * MIB, max_model_len=1600)
    count = num_concurrent_requests(config, 1600)
    # a state group of four layers is 256 KiB, 1600 tokens of four layers 1600 KiB
    assert count == pytest.approx(
        num_concurrent_requests(without, 1600) * (256 + 1600) / (256 * (1 + lookahead) + 1600), rel=0.03
    )


@pytest.mark.parametrize("block_size", [None, 64, 128])
def test_groups_of_different_block_sizes_share_a_pool(block_size):
    layers = mixed(4, 4) | {
        f"x{i}": MLAAttentionSpec(132, "uint8", sliding_window=99, block_size_multiple=64) for i in range(3)
    }
    config = plan(layers, GIB, max_model_len=8192, block_size=block_size)
    check_plan(config, layers, GIB)
    sizes = [group.block_size for group in config.groups]
    assert sizes == [block_size] * 3 if block_size else sorted(sizes) == [16, 16, 64]
    assert usable(config, GIB) >= 0.97


@pytest.mark.parametrize("length", [511, 512, 513])
def test_the_longest_length_is_exact_where_block_sizes_differ(length):
    layers = {
        "a": FullAttentionSpec(1, 64, "bfloat16"),
        "b": SlidingWindowSpec(1, 64, "bfloat16", 100, block_size_multiple=64),
    }
    with pytest.raises(CapacityError) as refusal:
        plan(layers, 1, max_model_len=length)
    need = refusal.value.need_bytes
    with pytest.raises(CapacityError) as refusal:
        plan(layers, need, max_model_len=4096)
    fits = refusal.value.fitting_tokens
    assert length <= fits
    assert plan(layers, need, max_model_len=fits).max_model_len == fits
    with pytest.raises(CapacityError):
        plan(layers, need, max_model_len=fits + 1)
