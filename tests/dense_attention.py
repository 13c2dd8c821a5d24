"""Attention written out, and a random paged case to compare a backend with it."""

import numpy as np
import torch

from girih.attention import GroupMetadata, KVCacheView
from girih.kv.specs.full_attention import FullAttentionSpec


def dense_attention(query, key, value, scale, window):
    """One row, every query over all tokens up to itself: [T, Hq, D] x [L, Hkv, D] x [L, Hkv, Dv] in float64."""
    num_queries, num_heads, _ = query.shape
    length, num_kv_heads, _ = key.shape
    key = key.double().repeat_interleave(num_heads // num_kv_heads, dim=1)
    value = value.double().repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    distance = torch.arange(length - num_queries, length)[:, None] - torch.arange(length)[None]
    hidden = (distance < 0) | (distance >= (window or length))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value).float()


def through_int8(x):
    """Say what is left of x [..., size] when each token and head is stored as int8 with a scale of max |x| / 127."""
    scale = x.float().abs().amax(-1, keepdim=True).double() / 127
    return torch.where(scale > 0, (x.double() / scale).round() * scale, 0.0)


def paged_cache(num_blocks, block_size, num_kv_heads, head_size, *, dtype, v_head_size=None, quantised=False):
    """Return one layer's cache within wider pages, as in the real pool, full of stale bytes; the last page is null."""
    spec = FullAttentionSpec(
        num_kv_heads, head_size, "int8" if quantised else str(dtype).removeprefix("torch."), v_head_size=v_head_size
    )
    page_bytes = spec.page_size_bytes(block_size)
    pool = torch.full(((num_blocks + 1) * 3 * page_bytes,), 0xFF, dtype=torch.uint8)  # NaN as a float, -1 as an int8
    tensors = {}
    for view in spec.view(block_size):
        elements = pool.view(getattr(torch, view.dtype))
        itemsize = elements.itemsize
        strides = (3 * page_bytes // itemsize, *torch.empty(view.shape, device="meta").stride())
        offset = (page_bytes + view.offset_bytes) // itemsize
        tensors[view.name] = elements.as_strided((num_blocks + 1, *view.shape), strides, offset)
    return KVCacheView(tensors, group=0, block_size=block_size)


def run_case(
    backend, rows, *, block_size=4, window=None, num_heads=4, num_kv_heads=2, head_size=8, v_head_size=None,
    dtype=torch.float32, quantised=False,
):  # fmt: skip
    """Attend for rows (num_computed, num_new); return outputs and the truth, both [T, Hq, Dv]."""
    generator = torch.Generator().manual_seed(len(rows) + block_size)
    width = max(-(-(computed + new) // block_size) for computed, new in rows)
    num_blocks = width * len(rows)
    cache = paged_cache(
        num_blocks, block_size, num_kv_heads, head_size, dtype=dtype, v_head_size=v_head_size, quantised=quantised
    )
    table = torch.randperm(num_blocks, generator=generator).view(len(rows), width).int().numpy()
    queries, keys, values, slots, truth = [], [], [], [], []
    for i, (computed, new) in enumerate(rows):
        length = computed + new
        key, value = (
            torch.randn(length, num_kv_heads, size, generator=generator).to(dtype)
            for size in (head_size, v_head_size or head_size)
        )
        query = torch.randn(new, num_heads, head_size, generator=generator).to(dtype)
        positions = np.arange(length)
        slot = table[i, positions // block_size].astype(np.int64) * block_size + positions % block_size
        first_live = max(0, computed - window + 1) if window else 0
        live = slice(first_live, computed)
        backend.write(cache, key[live], value[live], torch.from_numpy(slot[live]))
        table[i, : first_live // block_size] = num_blocks  # freed: points to the null page
        queries.append(query)
        keys.append(key[computed:])
        values.append(value[computed:])
        slots.append(slot[computed:])
        stored = (through_int8(key), through_int8(value)) if quantised else (key, value)
        truth.append(dense_attention(query, *stored, 0.3, window))
    backend.write(cache, torch.cat(keys), torch.cat(values), torch.from_numpy(np.concatenate(slots)))
    metadata = GroupMetadata(
        query_starts=np.concatenate(([0], np.cumsum([new for _, new in rows]))),
        num_computed_tokens=np.array([computed for computed, _ in rows]),
        block_table=table,
        slot_mapping=torch.from_numpy(np.concatenate(slots)),
    )
    work = backend.prepare(metadata, cache, window)
    return backend.attend(torch.cat(queries), cache, work, 0.3), torch.cat(truth)


ROWS = {
    "decodes": [(0, 1), (3, 1), (4, 1), (30, 1), (31, 1), (7, 1)],
    "prefills": [(0, 9), (5, 8), (16, 4), (0, 2)],
    "mixed": [(20, 1), (0, 13), (6, 1), (12, 5), (0, 1)],
}
