"""What a tensor-parallel rank keeps of a state is what engines give it: a share of the heads, groups copied if too few.

Engines split a Mamba 2 convolution into the channels of the heads and the B and C of the groups, a delta net's into
queries, keys and values, and Mamba 1, short convolutions and lightning attention by channels or heads alone. A rank
holds at least one group, so that ranks beyond the groups hold copies.
"""

import pytest
from real_hybrid_configs import (
    BAMBA_9B,
    FALCON_H1_05B,
    GRANITE_4_H_TINY,
    JAMBA_01,
    LFM2_350M,
    MINIMAX_TEXT_01,
    NEMOTRON_H_8B,
    QWEN3_NEXT_80B,
)

from girih import arch
from girih.arch import CacheDtypes
from girih.errors import PlanError

DTYPES = CacheDtypes(kv="bfloat16")


def state_of(config):
    specs = arch.load(config).kv_cache_specs(config, DTYPES).values()
    return next(spec for spec in specs if spec.retention_key(1 << 20).holds_state)


# model, shapes of one layer's state on one rank of 1, 2 and 4
SHAPES = {
    # 16 key heads of 128 twice, 32 value heads of 128; a state is key x value per value head
    "qwen3_next": (
        QWEN3_NEXT_80B,
        {1: ((8192, 3), (32, 128, 128)), 2: ((4096, 3), (16, 128, 128)), 4: ((2048, 3), (8, 128, 128))},
    ),
    # 48 heads of 64, and B and C of one group of 128 on every rank
    "granitemoehybrid": (
        GRANITE_4_H_TINY,
        {1: ((3328, 3), (48, 64, 128)), 2: ((1792, 3), (24, 64, 128)), 4: ((1024, 3), (12, 64, 128))},
    ),
    # 128 heads of 64, and one group of 128
    "bamba": (
        BAMBA_9B,
        {1: ((8448, 3), (128, 64, 128)), 2: ((4352, 3), (64, 64, 128)), 4: ((2304, 3), (32, 64, 128))},
    ),
    # 128 heads of 64, and 8 groups of 128, which are dealt out as well
    "nemotron_h": (
        NEMOTRON_H_8B,
        {1: ((10240, 3), (128, 64, 128)), 2: ((5120, 3), (64, 64, 128)), 4: ((2560, 3), (32, 64, 128))},
    ),
    # 24 heads of 64, and one group of 128
    "falcon_h1": (
        FALCON_H1_05B,
        {1: ((1792, 3), (24, 64, 128)), 2: ((1024, 3), (12, 64, 128)), 4: ((640, 3), (6, 64, 128))},
    ),
    "jamba": (
        JAMBA_01,
        {1: ((8192, 3), (8192, 16)), 2: ((4096, 3), (4096, 16)), 4: ((2048, 3), (2048, 16))},
    ),
    "lfm2": (LFM2_350M, {1: ((1024, 2),), 2: ((512, 2),), 4: ((256, 2),)}),
    "minimax": (MINIMAX_TEXT_01, {1: ((64, 128, 128),), 2: ((32, 128, 128),), 4: ((16, 128, 128),)}),
}  # fmt: skip


@pytest.mark.parametrize("tensor_parallel_size", [1, 2, 4])
@pytest.mark.parametrize(("config", "shapes"), SHAPES.values(), ids=SHAPES)
def test_a_rank_has_its_share_of_the_state(config, shapes, tensor_parallel_size):
    whole = state_of(config)
    shard = whole.shard(tensor_parallel_size)
    assert shard.shapes == shapes[tensor_parallel_size]
    assert shard.dtypes == whole.dtypes


@pytest.mark.parametrize(("config", "shapes"), SHAPES.values(), ids=SHAPES)
def test_splitting_twice_is_splitting_once(config, shapes):
    assert state_of(config).shard(2).shard(2) == state_of(config).shard(4)


def test_two_groups_are_dealt_out_to_two_ranks_and_copied_to_more():
    whole = state_of(GRANITE_4_H_TINY | {"mamba_n_groups": 2})
    conv_dims = [whole.shard(size).shapes[0][0] for size in (1, 2, 4, 8)]
    assert conv_dims == [3072 + 512, 1536 + 256, 768 + 256, 384 + 256]


def test_a_delta_net_s_keys_are_copied_where_ranks_are_more_than_its_key_heads():
    assert state_of(QWEN3_NEXT_80B).shard(32).shapes == ((3 * 128, 3), (1, 128, 128))


@pytest.mark.parametrize(
    ("config", "tensor_parallel_size"), [(GRANITE_4_H_TINY, 5), (QWEN3_NEXT_80B, 3), (LFM2_350M, 3), (JAMBA_01, 7)]
)
def test_heads_that_cannot_be_dealt_out_are_refused(config, tensor_parallel_size):
    with pytest.raises(PlanError, match=rf"cannot be dealt out to {tensor_parallel_size} tensor-parallel ranks"):
        state_of(config).shard(tensor_parallel_size)


def test_a_whole_hybrid_is_split_layer_by_layer():
    specs = arch.load(FALCON_H1_05B).kv_cache_specs(FALCON_H1_05B, DTYPES)
    shards = {name: spec.shard(2) for name, spec in specs.items()}
    assert shards["model.layers.0.self_attn"].num_kv_heads == 1
    assert shards["model.layers.35.mamba"].shapes == ((1024, 3), (12, 64, 128))


def test_one_state_of_qwen3_next_is_as_large_as_in_other_engines():
    assert state_of(QWEN3_NEXT_80B).page_size_bytes(16) == 2_146_304  # 1,097,728 with the sum in bfloat16
    halved = CacheDtypes(kv="bfloat16", state="bfloat16")
    specs = arch.load(QWEN3_NEXT_80B).kv_cache_specs(QWEN3_NEXT_80B, halved)
    assert specs["model.layers.0.linear_attn"].page_size_bytes(16) == 1_097_728
