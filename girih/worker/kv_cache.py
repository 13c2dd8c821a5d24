"""From a plan to each layer's cache: strided views of one byte buffer.

buffer   |page 0: layer a, layer b, pad|page 1: ...     |null page|
layer b, "value":  start = offset of b + offset of "value", one row per page, page_stride_bytes apart
"""

from __future__ import annotations

import torch

from girih.attention import KVCacheView
from girih.errors import BindingError
from girih.kv.config import KVCacheConfig
from girih.kv.spec import TensorView
from girih.layers.dtypes import torch_dtype


def make_views(buffer: torch.Tensor, config: KVCacheConfig) -> dict[str, KVCacheView]:
    """Return each layer's cache.

    Args:
        buffer: uint8 [config.total_bytes], aligned; the pool and the null page behind it.
        config: the plan.

    Returns:
        By layer name; every tensor is [num_blocks + 1, *shape of one page], the last row being the null page.

    Raises:
        BindingError: a layer's part that its dtype cannot address.
    """
    views = {}
    for group_index, group in enumerate(config.groups):
        for layer in group.layers:
            tensors = {
                view.name: _page_view(
                    buffer,
                    view,
                    name=f"{layer.name}: {view.name}",
                    start_bytes=layer.offset_bytes + view.offset_bytes,
                    stride_bytes=group.page_stride_bytes,
                    num_pages=config.num_blocks(group_index) + 1,
                )
                for view in layer.spec.view(group.block_size)
            }
            views[layer.name] = KVCacheView(tensors, group_index, group.block_size)
    return views


def _page_view(
    buffer: torch.Tensor, view: TensorView, *, name: str, start_bytes: int, stride_bytes: int, num_pages: int
) -> torch.Tensor:
    """Return [num_pages, *view.shape] over the buffer: page i starts at start_bytes + i * stride_bytes."""
    dtype = torch_dtype(view.dtype)
    if start_bytes % dtype.itemsize or stride_bytes % dtype.itemsize:
        raise BindingError(
            f"{name} starts at byte {start_bytes} of pages {stride_bytes} bytes apart, which is not a multiple of "
            f"the {dtype.itemsize} bytes of {view.dtype}"
        )
    elements = buffer[: buffer.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    dense_strides = torch.empty(view.shape, device="meta").stride()
    return elements.as_strided(
        (num_pages, *view.shape),
        (stride_bytes // dtype.itemsize, *dense_strides),
        start_bytes // dtype.itemsize,
    )
