"""Layers and caches meet by name only, and every mismatch names what is wrong."""

import pytest
import torch

from girih.attention import KVCacheView, reference
from girih.errors import BindingError
from girih.kv.specs.full_attention import FullAttentionSpec
from girih.layers.attention import Attention
from girih.layers.forward_context import ForwardContextBuilder, bind_kv_cache


def make_context(*names, num_kv_heads=2):
    builder = ForwardContextBuilder()
    for name in names:
        spec = FullAttentionSpec(num_kv_heads, 4, "float32", block_size_multiple=1)
        Attention(name, spec=spec, scale=1.0, sliding_window=None, backend=reference, builder=builder)
    return builder.build()


def make_view(num_kv_heads=2, dtype=torch.float32, names=("key", "value")):
    return KVCacheView({name: torch.zeros(3, 16, num_kv_heads, 4, dtype=dtype) for name in names}, 0, 16)


@pytest.mark.parametrize("name", ["", ".down_proj", "model.layers.3.self_attn"])
def test_two_layers_with_one_name_are_refused_naming_both(name):  # case 101
    builder = ForwardContextBuilder()
    make = {"scale": 1.0, "backend": reference, "builder": builder}
    Attention("other", spec=FullAttentionSpec(1, 2, "float32"), sliding_window=None, **make)
    Attention(name, spec=FullAttentionSpec(1, 4, "float32"), sliding_window=None, **make)
    with pytest.raises(BindingError) as error:
        Attention(name, spec=FullAttentionSpec(1, 8, "float32"), sliding_window=77, **make)
    for part in (repr(name), "number 1 (", "number 2 (", "head_size=4", "head_size=8", "window 77"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "names",
    [
        ("model.layers.3.attn", "mtp.layers.3.attn"),
        ("model.layers.3.self_attn", "model.layers.3.cross_attn"),
        ("model.layers.1.attn", "model.layers.11.attn"),
    ],
)
def test_names_that_look_alike_are_all_bound_to_their_own_cache(names):  # case 99
    caches = {name: make_view() for name in names}
    context = bind_kv_cache(caches, make_context(*names))
    assert all(context.kv_caches[name] is caches[name] for name in names)


def test_a_name_without_layer_and_a_layer_without_cache_are_both_named():
    with pytest.raises(BindingError, match=r"no layer for the cache of c; no cache for layer b"):
        bind_kv_cache({"a": make_view(), "c": make_view()}, make_context("a", "b"))


@pytest.mark.parametrize(
    "view",
    [
        make_view(num_kv_heads=3),
        make_view(dtype=torch.bfloat16),
        make_view(names=("key",)),
        make_view(names=("k", "v")),
    ],
)
def test_a_cache_of_wrong_shape_dtype_or_tensors_is_refused(view):
    with pytest.raises(BindingError, match=r"the cache of a has pages .* the layer needs .*float32"):
        bind_kv_cache({"a": view}, make_context("a"))


def test_a_context_is_a_value():
    context = make_context("a")
    bound = bind_kv_cache({"a": make_view()}, context)
    assert not context.kv_caches
    step = bound.for_step({}, {})
    assert step is not bound
    assert step.kv_caches == bound.kv_caches
    with pytest.raises(AttributeError):
        step.attention = {}


def test_a_model_without_any_cache_binds_nothing():
    assert bind_kv_cache({}, make_context()).layers == {}
