"""Layers that read another's cache: the chain is followed, the owner keeps enough, and what cannot be is refused."""

import pytest
from planner_models import check_plan, plan

from girih.errors import PlanError
from girih.kv import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SharedCacheSpec,
    SlidingWindowSpec,
    StateSpec,
)
from girih.kv.sharing import find_caches
from girih.kv.specs.full_attention import FullAttentionRetention
from girih.kv.specs.sliding_window import SlidingWindowRetention
from girih.units import GIB, MIB

FULL = FullAttentionSpec(2, 64, "bfloat16")


def window(size, **options):
    return SlidingWindowSpec(2, 64, "bfloat16", size, **options)


def reads(owner, spec=FULL):
    return SharedCacheSpec(owner, spec)


def test_a_chain_ends_at_the_layer_with_a_cache():
    layers = {"a": FULL, "b": reads("a"), "c": reads("b"), "d": FULL, "e": reads("c")}
    caches = find_caches(layers)
    assert [(cache.name, [name for name, _ in cache.readers]) for cache in caches] == [
        ("a", ["b", "c", "e"]),
        ("d", []),
    ]


def test_a_reader_may_come_before_its_owner_and_chains_may_be_long():
    layers = {f"l{i}": reads(f"l{i + 1}") for i in range(2000)} | {"l2000": FULL}
    (cache,) = find_caches(layers)
    assert len(cache.readers) == 2000


@pytest.mark.parametrize("owner", [window(100), window(512), FULL])
@pytest.mark.parametrize("reader", [window(100), window(512), FULL])
def test_the_owner_keeps_what_the_longest_of_owner_and_readers_needs(owner, reader):
    layers = {"a": owner, "b": reads("a", reader), "c": reads("a", window(7))}
    config = plan(layers, GIB, max_model_len=4096)
    check_plan(config, layers, GIB)
    (group,) = config.groups
    windows = [getattr(spec, "sliding_window", None) for spec in (owner, reader)]
    longest = FullAttentionRetention() if None in windows else SlidingWindowRetention(max(windows))
    assert group.retention == longest
    assert [layer.spec for layer in group.layers] == list(layers.values())  # each keeps its own window to attend by


@pytest.mark.parametrize("limit", [50, 100, 101, 512, 513, 10_000])
def test_what_is_kept_depends_on_the_limit_as_without_readers(limit):
    layers = {"a": window(100), "b": reads("a", window(512))}
    assert plan(layers, GIB, max_model_len=limit).groups[0].retention == window(512).retention_key(limit)


def test_readers_cost_no_bytes():  # case 102
    own = {f"layers.{i}": FULL if i % 5 == 4 else window(512) for i in range(15)}
    readers = {
        f"layers.{i}": reads("layers.14" if i % 5 == 4 else "layers.13", own[f"layers.{i - 5}"]) for i in range(15, 20)
    }
    config = plan(own | readers, GIB, max_model_len=32768)
    alone = plan(own, GIB, max_model_len=32768)
    check_plan(config, own | readers, GIB)
    assert sum(len(group.caches) for group in config.groups) == 15
    assert sum(len(group.layers) for group in config.groups) == 20
    assert (config.num_slabs, config.slab_bytes) == (alone.num_slabs, alone.slab_bytes)
    assert [group.page_size_bytes for group in config.groups] == [group.page_size_bytes for group in alone.groups]
    for group, without in zip(config.groups, alone.groups, strict=True):
        assert group.caches == without.layers
    assert "3 layers and 1 that read their caches" in config.describe()


def test_the_block_size_suits_the_readers_backend_too():
    layers = {"a": FULL, "b": reads("a", FULL.with_block_size_multiple(48))}
    assert plan(layers, MIB * 64, max_model_len=99).groups[0].block_size == 48
    with pytest.raises(PlanError, match="--block-size"):
        plan(layers, MIB * 64, max_model_len=99, block_size=16)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"a": reads("a")}, r"in a circle: a -> a; give one of them a cache"),
        ({"x": FULL, "a": reads("b"), "b": reads("c"), "c": reads("a")}, r"in a circle: a -> b -> c -> a"),
        ({"x": FULL, "a": reads("b"), "b": reads("c"), "c": reads("b")}, r"in a circle: a -> b -> c -> b"),
        ({"a": FULL, "b": reads("z")}, r"layer 'b' reads the cache of layer 'z', which does not exist; name one"),
        ({"a": FULL, "b": reads("c"), "c": reads("z")}, r"layer 'c' reads the cache of layer 'z'"),
        (
            {"a": FULL, "b": reads("a", FullAttentionSpec(1, 64, "bfloat16"))},
            r"layer 'b' reads the cache of layer 'a' as other tensors than it has: .*give both the same heads",
        ),
        ({"a": FULL, "b": reads("a", FullAttentionSpec(2, 64, "float16"))}, "other tensors"),
        ({"a": FULL, "b": reads("a", FullAttentionSpec(2, 64, "bfloat16", 32))}, "other tensors"),
        ({"a": MLAAttentionSpec(64, "bfloat16"), "b": reads("a")}, "other tensors"),
        (
            {"a": window(9), "b": reads("a", ChunkedLocalAttentionSpec(2, 64, "bfloat16", 8))},
            r"no layer keeps what all readers of .* layer 'a' need: 'a' sliding window 9, 'b' chunked local 8; give",
        ),
        (
            {"a": FULL, "b": reads("a", FullAttentionSpec(2, 64, "bfloat16", hit_trim_tokens=1))},
            "'b' full attention, 1",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name_with_the_remedy(layers, message):
    with pytest.raises(PlanError, match=message):
        find_caches(layers)


def test_full_attention_keeps_enough_for_any_reader():
    layers = {
        "a": window(9),
        "b": reads("a", ChunkedLocalAttentionSpec(2, 64, "bfloat16", 8)),
        "c": reads("a"),
    }
    assert plan(layers, GIB, max_model_len=4096).groups[0].retention == FullAttentionRetention()


def test_states_can_be_shared_by_layers_with_equal_ones():
    state = StateSpec(((3, 4),), ("float32",))
    config = plan({"a": state, "b": reads("a", state)}, MIB, max_model_len=99)
    assert config.groups[0].page_size_bytes == 48
