"""The layers of a group lie side by side in one page."""

from girih.kv import FullAttentionSpec, SharedCacheSpec, StateSpec
from girih.kv.grouping import group_layers
from girih.kv.pages import page_layout
from girih.kv.sharing import find_caches


def layout(block_size, **specs):
    (group,) = group_layers(find_caches(specs), 1 << 40, block_size)
    return page_layout(group)


def test_layers_of_any_size_are_packed_in_model_order():
    page = layout(16, a=FullAttentionSpec(2, 64, "bfloat16"), b=FullAttentionSpec(1, 64, "float32"))
    assert [(layer.name, layer.offset_bytes) for layer in page.layers] == [("a", 0), ("b", 8192)]
    assert page.page_size_bytes == 16384


def test_every_layer_starts_aligned():
    specs = {
        "a": FullAttentionSpec(1, 7, "int8", block_size_multiple=1),
        "b": FullAttentionSpec(3, 5, "float32", block_size_multiple=1),
    }
    page = layout(1, **specs)
    for layer in page.layers:
        assert layer.offset_bytes % layer.spec.page_alignment_bytes == 0
    assert page.layers[1].offset_bytes == page.layers[0].spec.page_size_bytes(1)
    assert page.page_size_bytes % page.alignment_bytes == 0


def test_who_reads_a_cache_is_where_it_is_and_adds_nothing():
    spec = FullAttentionSpec(2, 64, "bfloat16")
    page = layout(16, a=spec, b=spec, c=SharedCacheSpec("a", spec), d=SharedCacheSpec("b", spec), e=spec)
    places = [(layer.name, layer.offset_bytes) for layer in page.layers]
    assert places == [("a", 0), ("c", 0), ("b", 8192), ("d", 8192), ("e", 16384)]
    assert page.page_size_bytes == 3 * 8192


def test_a_state_page_is_one_state_of_every_layer():
    state = StateSpec(((5, 2), (3, 3)), ("float16", "float32"))
    page = layout(None, a=state, b=state)
    assert page.page_size_bytes == 2 * (32 + 48)
    assert page.block_size == 16
