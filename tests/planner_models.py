"""Models for tests of the planner, and what must be true of every plan."""

import importlib.util
import itertools
import sys
from pathlib import Path

from girih import plugins
from girih.kv import FullAttentionSpec, SlidingWindowSpec, get_kv_cache_configs
from girih.kv.capacity import request_fits
from girih.kv.config import one_per_class
from girih.kv.layout import MAX_PAGE_ID
from girih.kv.retention import NO_LIMIT

EXAMPLES = {
    f"{kind}-{index}": spec
    for kind in plugins.available("girih.kv.specs")
    for index, spec in enumerate(plugins.load("girih.kv.specs", kind, what="kind").EXAMPLES)
}


def mixed(num_full, num_sliding, window=512, heads=1, head_size=256, dtype="bfloat16", **options):
    """Return a model with so many layers of each kind, evenly mixed."""
    layers, count = {}, num_full + num_sliding
    for i in range(count):
        name = f"model.layers.{i}.self_attn"
        if i * num_full // count != (i + 1) * num_full // count:
            layers[name] = FullAttentionSpec(heads, head_size, dtype, **options)
        else:
            layers[name] = SlidingWindowSpec(heads, head_size, dtype, window, **options)
    return layers


def every(period, num_layers, special, other):
    """Return a model in which the last of each `period` layers is `special`."""
    return {f"layers.{i}": special if i % period == period - 1 else other for i in range(num_layers)}


def cut(layers, counts):
    """Deal a model out to pipeline stages with so many layers each."""
    assert sum(counts) == len(layers)
    ends = list(itertools.accumulate(counts))
    items = list(layers.items())
    return [dict(items[end - count : end]) for count, end in zip(counts, ends, strict=True)]


def of_examples(names):
    """Return a model with a layer for each of these `EXAMPLES`, and the layers whose caches they read."""
    layers = {}
    for name in names:
        spec = EXAMPLES[name]
        if spec.cache_owner is not None:
            layers[spec.cache_owner] = spec.spec
        layers[f"example.{name}"] = spec
    return layers


def families():
    """Return the model families that the benchmarks measure: facts about real models, counted without the planner."""
    path = Path(__file__).parents[1] / "benchmarks" / "families.py"
    if path.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[path.stem])
    return sys.modules[path.stem].FAMILIES


def plan(layers, memory, **options):
    """Plan one worker."""
    return get_kv_cache_configs([layers], [memory], **options)[0]


def check_plans(configs, specs, memory):
    """Assert what binding, the manager and the engine rely on, for the plans of all workers."""
    for config, layers, num_bytes in zip(configs, specs, memory, strict=True):
        check_plan(config, layers, num_bytes)
    assert len({(config.max_model_len, config.num_lookahead_tokens) for config in configs}) == 1
    first_group = 0
    for number, config in enumerate(one_per_class(configs)):  # equal within a class, or it raises
        assert (config.stage_class, config.first_group) == (number, first_group)
        first_group += len(config.groups)


def check_plan(config, layers, memory):
    """Assert what binding and the manager rely on, for one worker's plan."""
    names = [name for group in config.groups for name in group.layer_names]
    assert sorted(names) == sorted(layers)
    assert config.total_bytes <= max(0, memory)
    assert request_fits(config, config.max_model_len)
    for index, group in enumerate(config.groups):
        assert group.page_stride_bytes * group.pages_per_slab == config.slab_bytes
        assert group.page_size_bytes <= group.page_stride_bytes <= config.null_page_bytes
        assert (config.null_block_id(index) + 1) * group.page_stride_bytes <= config.total_bytes
        assert config.null_block_id(index) <= MAX_PAGE_ID
        _check_page(group, layers)


def _check_page(group, layers):
    offset_of, end = {}, 0
    for layer in group.caches:
        assert layer.offset_bytes >= end
        end = layer.offset_bytes + layer.spec.page_size_bytes(group.block_size)
        offset_of[layer.name] = layer.offset_bytes
    assert end <= group.page_size_bytes
    for layer in group.layers:
        assert layer.spec == layers[layer.name]
        assert group.retention.covers(layer.spec.retention_key(NO_LIMIT))
        for view in layer.spec.view(group.block_size):
            assert (layer.offset_bytes + view.offset_bytes) % 16 == group.page_stride_bytes % 16 == 0
            assert layer.offset_bytes + view.end_bytes <= group.page_size_bytes
        if group.retention.holds_state:
            continue
        assert group.block_size % layer.spec.block_size_multiple == 0
    for layer in group.layers:
        if layer.spec.cache_owner is not None:
            owner = layer.spec.cache_owner
            while layers[owner].cache_owner is not None:
                owner = layers[owner].cache_owner
            assert layer.offset_bytes == offset_of[owner]
            assert layer.spec.view(group.block_size) == layers[owner].view(group.block_size)
