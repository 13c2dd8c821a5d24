"""Layers that read another layer's cache: they never write it, see it through their own window, and cost no bytes."""

import numpy as np
import pytest
import torch

from girih.attention import GroupMetadata, reference
from girih.errors import BindingError
from girih.kv.config import KVCacheConfig, KVCacheGroupSpec, KVCacheLayer
from girih.kv.specs.full_attention import FullAttentionRetention, FullAttentionSpec
from girih.kv.specs.shared import SharedCacheSpec
from girih.kv.specs.sliding_window import SlidingWindowSpec
from girih.layers.attention import Attention
from girih.layers.forward_context import ForwardContextBuilder, bind_kv_cache
from girih.layers.rotary import RotaryEmbedding, apply_rotary
from girih.worker.kv_cache import make_views
from tests.dense_attention import dense_attention

BLOCK, HEADS, KV_HEADS, SIZE = 4, 4, 2, 8
OWN = FullAttentionSpec(KV_HEADS, SIZE, "float32", block_size_multiple=1)
PAGE_BYTES = OWN.page_size_bytes(BLOCK)
WINDOW = 5


def attention(name, builder, *, owner=None, window=None):
    reads = OWN if window is None else SlidingWindowSpec(KV_HEADS, SIZE, "float32", window, block_size_multiple=1)
    spec = OWN if owner is None else SharedCacheSpec(owner, reads, block_size_multiple=1)
    return Attention(name, spec=spec, scale=0.3, sliding_window=window, backend=reference, builder=builder)


def make_config(offsets, num_pages=20):
    """Return a plan of one group; offsets: layer -> (spec, offset in pages of one layer)."""
    layers = tuple(KVCacheLayer(name, spec, offset * PAGE_BYTES) for name, (spec, offset) in offsets.items())
    page_bytes = (max(layer.offset_bytes for layer in layers)) + PAGE_BYTES
    group = KVCacheGroupSpec(FullAttentionRetention(), BLOCK, layers, page_bytes, page_bytes, 1)
    return KVCacheConfig(num_pages, page_bytes, (group,), 64)


class Toy:
    """Two layers: the first attends over its own keys, the second over the same ones with its own queries, turned by
    the positions of this step, and through a window of its own."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        builder = ForwardContextBuilder()
        self.first, self.second = (
            attention("first", builder),
            attention("second", builder, owner="first", window=WINDOW),
        )
        config = make_config({"first": (self.first.spec, 0), "second": (self.second.spec, 0)})
        buffer = torch.full((config.total_bytes,), 0xFF, dtype=torch.uint8)
        self.context = bind_kv_cache(make_views(buffer, config), builder.build())
        self.rotary = RotaryEmbedding(SIZE, rope_type="default", rope_theta=100.0)
        self.weights = [
            torch.randn(16, heads * SIZE, generator=generator) / 4 for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
        ]
        self.between = torch.randn(HEADS * SIZE, 16, generator=generator) / 4

    def project(self, x, weight, positions):
        turned = (x @ weight).unflatten(1, (-1, SIZE))
        return turned if positions is None else apply_rotary(turned, *self.rotary.cos_sin(positions, x.dtype))

    def run(self, x, start):
        """Compute tokens start .. start + len(x): [num_tokens, HEADS * SIZE]."""
        positions = torch.arange(start, start + len(x))
        table = np.array([[7, 3, 11, 0, 9, 2]], np.int32)
        slots = torch.from_numpy(table[0].astype(np.int64))[positions // BLOCK] * BLOCK + positions % BLOCK
        metadata = GroupMetadata(np.array([0, len(x)]), np.array([start]), table, slots)
        context = self.context.for_step({0: metadata}, {})
        wq, wk, wv, wq2 = self.weights
        hidden = (
            x
            + self.first(
                self.project(x, wq, positions), self.project(x, wk, positions), self.project(x, wv, None), context
            )
            @ self.between
        )
        return self.second(self.project(hidden, wq2, positions), None, None, context)

    def dense(self, x):
        positions = torch.arange(len(x))
        wq, wk, wv, wq2 = self.weights
        key, value = self.project(x, wk, positions), self.project(x, wv, None)
        first = dense_attention(self.project(x, wq, positions), key, value, 0.3, None)
        hidden = x + first.flatten(1) @ self.between
        return dense_attention(self.project(hidden, wq2, positions), key, value, 0.3, WINDOW).flatten(1)


@pytest.mark.parametrize("chunk", [1, 3, 22])
def test_a_prefill_at_once_and_token_by_token_are_equal(chunk):  # case 104
    x = torch.randn(22, 16, generator=torch.Generator().manual_seed(1))
    toy = Toy()
    parts = [toy.run(x[start : start + chunk], start) for start in range(0, len(x), chunk)]
    torch.testing.assert_close(torch.cat(parts), toy.dense(x), atol=1e-5, rtol=1e-5)


def test_a_reader_never_writes(monkeypatch):
    toy = Toy()
    writes = []
    monkeypatch.setattr(reference, "write", lambda cache, *new: writes.append(cache))
    toy.run(torch.zeros(3, 16), 0)
    assert writes == [toy.context.kv_caches["first"]]
    with pytest.raises(AssertionError, match="second: who writes"):
        toy.second(torch.zeros(1, HEADS, SIZE), torch.zeros(1, KV_HEADS, SIZE), torch.zeros(1, KV_HEADS, SIZE), None)
    with pytest.raises(AssertionError, match="first: who writes"):
        toy.first(torch.zeros(1, HEADS, SIZE), None, None, None)


def test_of_twenty_layers_five_are_bound_to_the_caches_of_two_others():  # case 102
    builder = ForwardContextBuilder()
    layers = [attention(f"l.{i}", builder, owner=f"l.{13 + i % 2}" if i >= 15 else None) for i in range(20)]
    places = {layer.name: (layer.spec, i if i < 15 else 13 + i % 2) for i, layer in enumerate(layers)}
    config = make_config(places)
    assert sum(layer.spec.page_size_bytes(BLOCK) for layer in layers) == config.groups[0].page_size_bytes
    context = bind_kv_cache(make_views(torch.zeros(config.total_bytes, dtype=torch.uint8), config), builder.build())
    starts = [context.kv_caches[layer.name].tensors["key"].data_ptr() for layer in layers]
    assert len(set(starts)) == 15
    assert starts[15:] == [starts[13 + i % 2] for i in range(15, 20)]


def test_a_chain_of_readers_ends_at_the_one_owner():
    builder = ForwardContextBuilder()
    layers = [attention("a", builder), attention("b", builder, owner="a"), attention("c", builder, owner="b")]
    config = make_config({layer.name: (layer.spec, 0) for layer in layers})
    views = make_views(torch.zeros(config.total_bytes, dtype=torch.uint8), config)
    assert set(bind_kv_cache(views, builder.build()).kv_caches) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"a": 0, "b": 1, "r": 1}, "layer r reads the cache of a, but would be bound to another place"),
        ({"a": 0, "b": 0, "r": 0}, "layers a and b would both write the same cache"),
    ],
)
def test_a_plan_that_shares_where_no_layer_asked_or_not_where_one_did_is_refused(places, message):  # case 99
    builder = ForwardContextBuilder()
    layers = [attention("a", builder), attention("b", builder), attention("r", builder, owner="a")]
    config = make_config({layer.name: (layer.spec, places[layer.name]) for layer in layers})
    views = make_views(torch.zeros(config.total_bytes, dtype=torch.uint8), config)
    with pytest.raises(BindingError, match=message):
        bind_kv_cache(views, builder.build())


def test_a_reader_of_a_layer_that_is_not_there_is_refused():
    builder = ForwardContextBuilder()
    reader = attention("r", builder, owner="gone")
    config = make_config({"r": (reader.spec, 0)})
    with pytest.raises(BindingError, match="layer r reads the cache of gone"):
        bind_kv_cache(make_views(torch.zeros(config.total_bytes, dtype=torch.uint8), config), builder.build())
