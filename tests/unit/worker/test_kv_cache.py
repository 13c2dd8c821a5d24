"""Views of the pool: every layer's bytes at its own place, none shared, the null page behind all; copies of pages."""

import numpy as np
import pytest
import torch

from girih.errors import BindingError
from girih.kv.config import KVCacheConfig, KVCacheGroupSpec, KVCacheLayer
from girih.kv.plan import get_kv_cache_configs
from girih.kv.specs.full_attention import FullAttentionRetention, FullAttentionSpec
from girih.kv.specs.sliding_window import SlidingWindowSpec
from girih.kv.specs.state import StateRetention, StateSpec
from girih.messages import PageCopies
from girih.worker.kv_cache import PagePool, byte_ranges, make_views

SPECS = {
    "a": FullAttentionSpec(3, 8, "float32"),
    "b": SlidingWindowSpec(2, 4, "bfloat16", 8),
    "c": SlidingWindowSpec(1, 6, "bfloat16", 8),
    "d": SlidingWindowSpec(5, 2, "float32", 8),
}


@pytest.fixture(scope="module")
def config():
    (config,) = get_kv_cache_configs([SPECS], [1 << 20], max_model_len=256)
    assert len(config.groups) == 2
    return config


def test_every_page_of_every_layer_has_bytes_of_its_own(config):
    """Write a different number into each tensor of each page of one group; all are read back unchanged."""
    for g, group in enumerate(config.groups):
        buffer = torch.zeros(config.total_bytes, dtype=torch.uint8)
        views = make_views(buffer, config)
        written = []
        for layer in group.layers:
            for tensor in views[layer.name].tensors.values():
                assert tensor.shape[0] == config.num_blocks(g) + 1
                for page in range(tensor.shape[0]):
                    tensor[page] = len(written) % 251
                    written.append(tensor[page])
        assert all(bool((page == i % 251).all()) for i, page in enumerate(written))


def test_a_page_lies_within_its_slab_and_the_null_page_behind_the_pool(config):
    buffer = torch.zeros(config.total_bytes, dtype=torch.uint8)
    views = make_views(buffer, config)
    for g, group in enumerate(config.groups):
        for layer in group.layers:
            for tensor in views[layer.name].tensors.values():
                for page, slab in ((0, 0), (group.pages_per_slab, 1), (config.num_blocks(g) - 1, config.num_slabs - 1)):
                    buffer.zero_()
                    tensor[page] = 1
                    touched = buffer.nonzero().squeeze(1) // config.slab_bytes
                    assert touched.unique().tolist() == [slab]
                buffer.zero_()
                tensor[config.null_block_id(g)] = 1
                assert buffer.nonzero().min() >= config.pool_bytes


def test_a_layers_page_starts_where_the_plan_says(config):
    buffer = torch.zeros(config.total_bytes, dtype=torch.uint8)
    views = make_views(buffer, config)
    for group in config.groups:
        for layer in group.layers:
            for view in layer.spec.view(group.block_size):
                start = views[layer.name].tensors[view.name][3].data_ptr() - buffer.data_ptr()
                assert start == 3 * group.page_stride_bytes + layer.offset_bytes + view.offset_bytes


def test_pages_beyond_two_gib_are_addressed(monkeypatch):
    """Byte offsets do not fit in 32 bits; the memory is never touched but for one page."""
    layer = KVCacheLayer("a", FullAttentionSpec(1, 8, "float32"), 0)
    group = KVCacheGroupSpec(FullAttentionRetention(), 16, (layer,), 1024, 1024, 1)
    config = KVCacheConfig(5 << 20, 1024, (group,), 128)
    buffer = torch.empty(config.total_bytes, dtype=torch.uint8)
    tensor = make_views(buffer, config)["a"].tensors["value"]
    assert tensor[-2].data_ptr() - buffer.data_ptr() == (5 << 30) - 1024 + 512
    tensor[-2] = 7.0
    assert bool((tensor[-2] == 7).all())


def test_an_offset_that_the_dtype_cannot_address_is_refused():
    layer = KVCacheLayer("a", FullAttentionSpec(1, 8, "float32"), 2)
    group = KVCacheGroupSpec(FullAttentionRetention(), 16, (layer,), 1024, 1028, 1)
    config = KVCacheConfig(4, 1028, (group,), 128)
    with pytest.raises(BindingError, match="a: key starts at byte 2"):
        make_views(torch.zeros(config.total_bytes, dtype=torch.uint8), config)


def two_groups(num_slabs=6, first_group=0):
    """Return a plan whose pages are 1000 of 1008 and 640 of 672 bytes, 2 and 3 to a slab."""
    keys = KVCacheLayer("keys", FullAttentionSpec(1, 5, "float32"), 0)
    state = KVCacheLayer("state", StateSpec(((20, 4), (80,)), ("float32", "float32")), 0)
    groups = (
        KVCacheGroupSpec(FullAttentionRetention(), 25, (keys,), 1000, 1008, 2),
        KVCacheGroupSpec(StateRetention(), 16, (state,), 640, 672, 3),
    )
    return KVCacheConfig(num_slabs, 2016, groups, 128, first_group=first_group)


def copies(group, *pairs):
    sources, destinations = np.array(pairs, np.int32).reshape(-1, 2).T
    return PageCopies(group, sources, destinations)


def random_buffer(config):
    return torch.randint(256, (config.total_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("group", "num_pages"), [(0, 12), (1, 18)])
def test_a_copy_changes_exactly_the_bytes_of_that_page_in_that_group(group, num_pages):  # case 35
    config = two_groups()
    size, stride = config.groups[group].page_size_bytes, config.groups[group].page_stride_bytes
    for source, destination in ((5, 6), (6, 5), (0, num_pages - 1), (num_pages - 1, 0)):
        buffer = random_buffer(config)
        expected = buffer.clone()
        expected[destination * stride : destination * stride + size] = buffer[source * stride : source * stride + size]
        PagePool(buffer, config).copy([copies(group, (source, destination))])
        assert torch.equal(buffer, expected)


def test_copies_come_one_list_after_the_other():
    """The second list reads what the first wrote and overwrites what it left, in one group and across groups."""
    config = two_groups()
    buffer = random_buffer(config)
    pages = [buffer[i * 1008 : i * 1008 + 1000].clone() for i in range(12)]
    PagePool(buffer, config).copy([copies(0, (3, 8), (4, 9)), copies(0, (8, 3), (7, 4)), copies(0, (4, 7))])
    for page, content in {8: 3, 9: 4, 3: 3, 4: 7, 7: 7, 5: 5, 10: 10}.items():
        assert torch.equal(buffer[page * 1008 : page * 1008 + 1000], pages[content]), page

    buffer = random_buffer(config)
    expected = buffer.clone()
    expected[0:1000] = buffer[5040:6040]  # page 5 of group 0 to the slab that group 1 has left ...
    expected[4032:4672] = expected[0:640]  # ... from where page 0 of group 1 had not gone before
    PagePool(buffer, config).copy([copies(0, (5, 0)), copies(1, (0, 6))])
    assert torch.equal(buffer, expected)


def test_the_copies_of_groups_of_other_workers_are_left_out():
    config = two_groups(first_group=3)
    buffer = random_buffer(config)
    before = buffer.clone()
    pool = PagePool(buffer, config)
    pool.copy([copies(0, (1, 2)), copies(1, (1, 2)), copies(2, (1, 2)), copies(5, (1, 99))])
    assert torch.equal(buffer, before)
    pool.copy([copies(4, (1, 2))])
    assert torch.equal(buffer[1344:1984], before[672:1312])


@pytest.mark.parametrize("pair", [(12, 0), (0, 12), (-1, 0), (0, -1)])
def test_the_null_page_is_neither_source_nor_destination(pair):
    config = two_groups()
    buffer = random_buffer(config)
    before = buffer.clone()
    wrong = next(page for page in pair if page)
    with pytest.raises(BindingError, match=f"page {wrong} of group 0 is to be copied, but its pages are 0 to 11"):
        PagePool(buffer, config).copy([copies(0, (1, 2), pair)])
    assert torch.equal(buffer, before)


def test_pages_beyond_two_gib_are_copied():
    config = two_groups(num_slabs=2_000_000)
    buffer = torch.empty(config.total_bytes, dtype=torch.uint8)
    far = 3_999_999 * 1008
    buffer[:1000] = 7
    PagePool(buffer, config).copy([copies(0, (0, 3_999_999))])
    assert bool((buffer[far : far + 1000] == 7).all())


def test_neighbouring_slabs_are_one_range_of_bytes():
    assert byte_ranges(np.array([7, 2, 3, 0, 4], np.int32), 1000) == [(0, 1000), (2000, 5000), (7000, 8000)]
    assert byte_ranges(np.array([2_999_999], np.int32), 1 << 20) == [(2_999_999 << 20, 3_000_000 << 20)]
    assert byte_ranges(np.zeros(0, np.int32), 1000) == []
