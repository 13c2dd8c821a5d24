"""The operations of a layer, each in one compiled pass; see `girih.layers.operations.Operations` for what each does.

Only in float32: other dtypes round between operations, and torch does them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import pack, unpack
from typing import TYPE_CHECKING

import torch

from girih.kernels.kernel import Kernel
from girih.kernels.threads import run
from girih.layers.operations import plain
from girih.layers.operations._kernels import ADD_NORM, F4_BYTES, GATE, SPLIT_HEADS
from girih.units import cdiv

if TYPE_CHECKING:
    from girih.layers.norm import RMSNorm

THREAD_ELEMENTS = 1 << 16
"""So many are worth the start of another thread."""

SHARES_PER_THREAD = 4
"""Rows are taken in so many shares, as some threads may be slower than others."""

_NO_NORM = (0, 0, 0)


def add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, after: RMSNorm | None, norm: RMSNorm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add to the residual stream, in place, and normalise the sum."""
    if not _can_take(x) or not (delta is None or delta.is_contiguous()):
        return plain.add_norm(x, delta, after, norm)
    normed = torch.empty_like(x)
    after_weight, *after_numbers = _NO_NORM if after is None else _fields(after)
    weight, *numbers = _fields(norm)
    fields = (
        x.data_ptr(), 0 if delta is None else delta.data_ptr(), normed.data_ptr(), x.shape[1],
        after_weight, weight, *after_numbers, *numbers,
    )  # fmt: skip
    _run(ADD_NORM, x, fields)
    return x, normed


def split_heads(
    merged: torch.Tensor,
    sizes: Sequence[int],
    head_dim: int,
    cos_sin: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[RMSNorm, RMSNorm] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take apart queries, keys and values, and turn queries and keys by their angles, in place."""
    if not _can_take(merged):
        return plain.split_heads(merged, sizes, head_dim, cos_sin, norms)
    cos, sin = cos_sin
    num_queries, num_keys, num_values = (size // head_dim for size in sizes)
    (query_norm, *query_numbers), (key_norm, *key_numbers) = (
        (_NO_NORM, _NO_NORM) if norms is None else map(_fields, norms)
    )
    fields = (
        merged.data_ptr(), merged.shape[1] * F4_BYTES, num_queries, num_keys, head_dim,
        cos.data_ptr(), sin.data_ptr(), cos.stride(0) * F4_BYTES,
        query_norm, key_norm, *query_numbers, *key_numbers,
    )  # fmt: skip
    _run(SPLIT_HEADS, merged, fields)
    heads = merged.view(merged.shape[0], num_queries + num_keys + num_values, head_dim)
    return (
        heads[:, :num_queries],
        heads[:, num_queries : num_queries + num_keys],
        heads[:, num_queries + num_keys :],
    )


def gate(activation: str, merged: torch.Tensor) -> torch.Tensor:
    """Return activation(gate) * up."""
    if not _can_take(merged) or activation not in GATE:
        return plain.gate(activation, merged)
    size = merged.shape[1] // 2
    gated = merged.new_empty(merged.shape[0], size)
    _run(GATE[activation], merged, (merged.data_ptr(), gated.data_ptr(), size))
    return gated


def _can_take(x: torch.Tensor) -> bool:
    return x.dtype == torch.float32 and x.is_contiguous()


def _fields(norm: RMSNorm) -> tuple[int, int, int]:
    """Return the address of a norm's weights, and the bits of its float64 numbers."""
    return norm.weight.data_ptr(), *unpack("qq", pack("dd", norm.eps, norm.offset))


def _run(kernel: Kernel, x: torch.Tensor, fields: Sequence[int]) -> None:
    """Call a kernel for all rows of x, on as many threads as they are worth."""
    num_rows = x.shape[0]
    num_threads = max(1, min(torch.get_num_threads(), x.numel() // THREAD_ELEMENTS))
    counter = array("q", (0,))
    rows_at_once = max(1, cdiv(num_rows, num_threads * SHARES_PER_THREAD)) if num_threads > 1 else num_rows
    run(kernel, (counter.buffer_info()[0], num_rows, rows_at_once, *fields), num_threads)
