"""The layers of a group lie side by side in one page."""

from girih.kv import FullAttentionSpec
from girih.kv.grouping import group_layers
from girih.kv.pages import page_layout


def layout(block_size, **specs):
    (group,) = group_layers(specs, 1 << 40)
    return page_layout(group, block_size)


def test_layers_of_any_size_are_packed_in_model_order():
    page = layout(16, a=FullAttentionSpec(2, 64, "bfloat16"), b=FullAttentionSpec(1, 64, "float32"))
    assert [(layer.name, layer.offset_bytes) for layer in page.layers] == [("a", 0), ("b", 8192)]
    assert page.page_size_bytes == 16384


def test_every_layer_starts_aligned():
    page = layout(1, a=FullAttentionSpec(1, 7, "int8"), b=FullAttentionSpec(3, 5, "float32"))
    for layer in page.layers:
        assert layer.offset_bytes % layer.spec.page_alignment_bytes == 0
    assert page.layers[1].offset_bytes == page.layers[0].spec.page_size_bytes(1)
    assert page.page_size_bytes % page.alignment_bytes == 0
