"""Which layers, heads and token ids each worker has, and what is refused before one is started."""

import dataclasses

import pytest

from girih import arch
from girih.config import EngineConfig
from girih.errors import ConfigError
from girih.layers.parallel import ALONE, Ranks
from girih.parallel import ParallelPlace, place_of, split_layers

MANY = {"model": "m", "executor": "multiproc"}
SMOLLM2 = {"model_type": "llama", "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}


def ranks_of(size):
    return [Ranks(dataclasses.replace(ALONE.place, tensor_rank=rank, tensor_size=size)) for rank in range(size)]


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "split", "expected"),
    [
        (18, 1, None, [18]),
        (18, 2, None, [9, 9]),
        (10, 4, None, [3, 3, 2, 2]),  # the first stages get one more
        (18, 2, (10, 8), [10, 8]),
        (18, 2, (17, 1), [17, 1]),
        (3, 3, None, [1, 1, 1]),
    ],
)
def test_layers_are_dealt_out_in_order(num_layers, num_stages, split, expected):
    stages = split_layers(num_layers, num_stages, split)
    assert [len(stage) for stage in stages] == expected
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))


@pytest.mark.parametrize(
    ("num_stages", "split", "message"),
    [
        (2, (10, 9), "--pipeline-split 10,9 deals out 19 layers, the model has 18"),
        (2, (18,), "--pipeline-split 18 is for 1 stages, --pipeline-parallel-size is 2"),
        (1, (9, 9), "is for 2 stages, --pipeline-parallel-size is 1"),
        (19, None, "--pipeline-parallel-size 19 is more than the model's 18 layers"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(num_stages, split, message):
    with pytest.raises(ConfigError, match=message):
        split_layers(18, num_stages, split)


def test_ranks_are_counted_within_stages():
    config = EngineConfig(**MANY, tensor_parallel_size=2, pipeline_parallel_size=3, pipeline_split=(1, 3, 2))
    places = [place_of(config, rank, 6) for rank in range(config.world_size)]
    assert places[3] == ParallelPlace(3, tensor_rank=1, tensor_size=2, stage=1, num_stages=3, layers=range(1, 4))
    assert [(place.is_first, place.is_last) for place in places[::2]] == [(True, False), (False, False), (False, True)]
    assert [place.rank for place in places if place.samples] == [4] == [places[0].sampling_rank]
    assert (places[3].previous_rank, places[3].next_rank, list(places[3].tensor_ranks)) == (1, 5, [2, 3])


def test_one_process_cannot_be_several_workers():
    with pytest.raises(ConfigError, match=r"needs 6 workers, the executor uniproc has one: .* multiproc or ray"):
        EngineConfig(model="m", tensor_parallel_size=3, pipeline_parallel_size=2)


@pytest.mark.parametrize("split", [(0, 3), (2.0, 1), ("3",)])
def test_a_stage_has_a_whole_number_of_layers(split):
    with pytest.raises(ConfigError, match=r"pipeline_split=.* whole number of at least 1 layer for each stage"):
        EngineConfig(**MANY, pipeline_split=split)
    assert EngineConfig(**MANY, pipeline_split=[3, 2]).pipeline_split == (3, 2)


def test_heads_that_cannot_be_dealt_out_are_refused_with_the_sizes_that_work():
    with pytest.raises(ConfigError, match=r"9 query heads and 3 key/value heads .* to 2 .*: 1, 3, 9$"):
        arch.check_tensor_parallel(SMOLLM2, 2)


@pytest.mark.parametrize("size", range(1, 33))
@pytest.mark.parametrize("kv_heads", [8, 4, 1])
def test_each_rank_has_the_key_heads_of_its_query_heads_or_is_refused(kv_heads, size):
    """Case 95."""
    config = SMOLLM2 | {"num_attention_heads": 32, "num_key_value_heads": kv_heads, "hidden_size": 64}
    if 32 % size:
        with pytest.raises(ConfigError, match=f"32 query heads and {kv_heads} key/value heads"):
            arch.check_tensor_parallel(config, size)
        return
    arch.check_tensor_parallel(config, size)
    ranks = ranks_of(size)
    assert [head for rank in ranks for head in rank.share_heads(32)] == list(range(32))
    for rank in ranks:
        read = sorted({head * kv_heads // 32 for head in rank.share_heads(32)})
        assert list(rank.share_heads(kv_heads)) == read
    (spec,) = set(
        arch.load(config).kv_cache_specs(config | {"num_hidden_layers": 1}, arch.CacheDtypes("bfloat16")).values()
    )
    assert spec.shard(size).num_kv_heads == len(ranks[0].share_heads(kv_heads))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_items", [1, 3, 8, 67, 1536])
def test_columns_and_token_ids_are_on_one_rank_each(num_items, size):
    for shares in (
        [r.share(num_items) for r in ranks_of(size)],
        [r.share_vocabulary(num_items) for r in ranks_of(size)],
    ):
        assert [item for share in shares for item in share] == list(range(num_items))
    columns = [len(rank.share(num_items)) for rank in ranks_of(size)]
    assert max(columns) - min(columns) <= 1
