"""Views of the pool: every layer's bytes at its own place, none shared, the null page behind all."""

import pytest
import torch

from girih.errors import BindingError
from girih.kv.config import KVCacheConfig, KVCacheGroupSpec, KVCacheLayer
from girih.kv.plan import get_kv_cache_configs
from girih.kv.specs.full_attention import FullAttentionRetention, FullAttentionSpec
from girih.kv.specs.sliding_window import SlidingWindowSpec
from girih.worker.kv_cache import make_views

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
