"""Slabs: geometry that always holds, and how close to the ideal it comes."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from planner_models import mixed

from girih.kv import FullAttentionSpec, SlidingWindowSpec
from girih.kv.capacity import pages_at, slabs_needed
from girih.kv.grouping import group_layers
from girih.kv.layout import MAX_PAGE_ID, Load, counts_to_compare, score, slab_layout, slab_layouts
from girih.kv.pages import PageLayout, page_layout
from girih.kv.sharing import find_caches
from girih.kv.specs.full_attention import FullAttentionRetention
from girih.units import GIB, MIB

LOAD = Load((100, 1000, 8192, 32768), 8)


def page(size, alignment=16):
    return PageLayout(FullAttentionRetention(), 16, (), size, alignment)


def pages_of(layers):
    return [page_layout(group) for group in group_layers(find_caches(layers), 1 << 40)]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=6),
    alignment=st.sampled_from([1, 16, 64]),
)
def test_every_page_of_every_group_starts_aligned_and_fits_its_stride(sizes, alignment):
    for config in slab_layouts([page(size * alignment, alignment) for size in sizes], 1 << 40, 0):
        for group, size in zip(config.groups, sizes, strict=True):
            assert group.pages_per_slab >= 1
            assert group.page_stride_bytes * group.pages_per_slab == config.slab_bytes
            assert group.page_stride_bytes % alignment == 0
            assert group.page_stride_bytes >= group.page_size_bytes == size * alignment


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=5))
def test_slabs_of_up_to_64_of_the_largest_pages_are_compared(sizes):
    sizes = tuple(size * 16 for size in sizes)
    largest = sizes.index(max(sizes))
    candidates = counts_to_compare(sizes, (1.0,) * len(sizes), 16)
    assert {counts[largest] for counts in candidates} == set(range(1, 65))
    assert len(set(candidates)) == len(candidates)


def test_a_group_that_hardly_counts_does_not_enlarge_the_slab():
    # a state of 32 bytes per request beside pages of many kilobytes: 85,000 of them in a slab would be of no use
    for counts in counts_to_compare((49152, 3520, 32), (0.99, 0.1, 0.0), 16):
        slab_bytes = slab_layout([page(49152), page(3520), page(32)], counts, 1 << 40, 0).slab_bytes
        assert slab_bytes <= max(counts[0] * 49152, counts[1] * 3520) * 1.06


def test_one_page_more_is_taken_where_the_slab_grows_by_less_than_it_gains():
    # 11 pages of 133,888 bytes are 0.1 % less than 30 of 49,152
    assert (30, 11) in counts_to_compare((49152, 133888), (0.5, 0.5), 16)


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=4), memory=st.integers(0, 1 << 40))
def test_pool_and_null_page_fit_in_the_memory_and_page_ids_in_32_bits(sizes, memory):
    layouts = slab_layouts([page(size * 16) for size in sizes], memory, 0)
    assert layouts
    for config in layouts:
        assert config.num_slabs == 0 or config.total_bytes <= memory
        for index, group in enumerate(config.groups):
            assert config.null_block_id(index) <= MAX_PAGE_ID
            assert config.null_block_id(index) * group.page_stride_bytes == config.pool_bytes
            assert config.null_page_bytes >= group.page_stride_bytes


def test_a_lone_group_loses_nothing_but_the_tail():
    config = slab_layouts([page(48 * 1024)], 100 * 48 * 1024 + 5, 0)[0]
    assert (config.num_slabs, config.slab_bytes, config.null_page_bytes) == (99, 48 * 1024, 48 * 1024)


def test_a_pool_of_few_slabs_per_group_scores_low():
    pages = pages_of(mixed(3, 15))

    def best(memory):
        return max(score(config, memory, LOAD) for config in slab_layouts(pages, memory, 0))

    assert best(4 * MIB) < 0.9 < 0.97 < best(64 * MIB)


# (full layers, sliding layers, window, key/value heads, head size, bytes as dtype)
FAMILIES = {
    "gemma3-270m": (3, 15, 512, 1, 256),
    "gemma3-1b": (4, 22, 512, 1, 256),
    "gemma3-27b": (10, 52, 1024, 16, 128),
    "gemma2-9b": (21, 21, 4096, 8, 256),
    "gpt-oss-20b": (12, 12, 128, 8, 64),
    "gpt-oss-120b": (18, 18, 128, 8, 64),
    "ministral-8b": (9, 27, 32768, 8, 128),
    "llama-8b": (32, 0, 0, 8, 128),
    "uneven": (19, 18, 512, 4, 128),
    "one of many": (36, 1, 512, 8, 128),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("memory_gib", [40, 80])
def test_whole_groups_reach_99_percent_of_the_ideal_in_large_pools(family, memory_gib):
    num_full, num_sliding, window, heads, head_size = FAMILIES[family]
    layers = mixed(num_full, num_sliding, window, heads, head_size)
    memory = memory_gib * GIB
    best = max(slab_layouts(pages_of(layers), memory, 0), key=lambda config: score(config, memory, LOAD))
    assert score(best, memory, LOAD) >= 0.99
    assert 1 - best.total_bytes / memory <= 0.004


@settings(max_examples=60, deadline=None)
@given(
    layers=st.lists(
        st.tuples(st.sampled_from([0, 7, 64, 500]), st.integers(1, 8), st.sampled_from([16, 64, 128])),
        min_size=1,
        max_size=12,
    ),
    memory=st.integers(1 << 20, 1 << 33),
)
def test_the_score_never_promises_more_than_the_slabs_hold(layers, memory):
    specs = {
        str(i): SlidingWindowSpec(heads, size, "float32", window)
        if window
        else FullAttentionSpec(heads, size, "float32")
        for i, (window, heads, size) in enumerate(layers)
    }
    for config in slab_layouts(pages_of(specs), memory, 0):
        promised = score(config, memory, Load((1000,), 1))
        each = pages_at(config.groups, 1000)
        ideal = memory / sum(n * group.page_size_bytes for n, group in zip(each, config.groups, strict=True))
        count = math.floor(promised * ideal * (1 - 1e-9))
        slabs = slabs_needed([count * n for n in each], config.groups)
        assert promised <= 1
        assert slabs <= config.num_slabs
