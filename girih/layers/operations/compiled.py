"""The operations of a layer, each in one compiled pass; see `girih.layers.operations.Operations` for what each does.

Other dtypes than float32 and bfloat16, and activations without a kernel, are left to torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from girih.kernels.kernel import Kernel
from girih.kernels.threads import float_bits, run_rows
from girih.layers.operations import plain
from girih.layers.operations._kernels import ADD_NORM, GATE, SPLIT_HEADS

if TYPE_CHECKING:
    from girih.layers.norm import RMSNorm

_NO_NORM = (0, 0, 0)


def add(x: torch.Tensor, delta: torch.Tensor, after: RMSNorm | None) -> torch.Tensor:
    """Add to the residual stream, in place, what goes through a norm before or as it is."""
    if x.dtype not in ADD_NORM:
        return plain.add(x, delta, after)
    assert delta.is_contiguous()
    _run(ADD_NORM[x.dtype], x, x.data_ptr(), delta.data_ptr(), 0, x.shape[1], *_fields(after), *_NO_NORM)
    return x


def add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, after: RMSNorm | None, norm: RMSNorm, to: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add to the residual stream, in place, and normalise the sum."""
    if x.dtype not in ADD_NORM:
        return plain.add_norm(x, delta, after, norm, to)
    assert delta is None or delta.is_contiguous()
    at = 0 if delta is None else delta.data_ptr()
    _run(ADD_NORM[x.dtype], x, x.data_ptr(), at, to.data_ptr(), x.shape[1], *_fields(after), *_fields(norm))
    return x, to


def split_heads(
    merged: torch.Tensor,
    num_heads: tuple[int, int, int],
    head_dim: int,
    cos_sin: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[RMSNorm, RMSNorm] | None,
) -> Sequence[torch.Tensor]:
    """Take apart queries, keys and values, and turn queries and keys by their angles, in place."""
    if merged.dtype not in SPLIT_HEADS:
        return plain.split_heads(merged, num_heads, head_dim, cos_sin, norms)
    cos, sin = cos_sin
    query_norm, key_norm = (None, None) if norms is None else norms
    _run(
        SPLIT_HEADS[merged.dtype], merged, merged.data_ptr(), merged.shape[1] * merged.itemsize,
        num_heads[0], num_heads[1], head_dim, cos.data_ptr(), sin.data_ptr(), cos.stride(0) * cos.itemsize,
        *_fields(query_norm), *_fields(key_norm),
    )  # fmt: skip
    # not `split`, which is written in Python and takes twice as long
    return merged.view(merged.shape[0], sum(num_heads), head_dim).split_with_sizes(num_heads, dim=1)


def gate(activation: str, merged: torch.Tensor) -> torch.Tensor:
    """Return activation(gate) * up."""
    kernel = GATE.get((activation, merged.dtype))
    if kernel is None:
        return plain.gate(activation, merged)
    num_rows, width = merged.shape
    gated = torch.empty(num_rows, width // 2, dtype=merged.dtype)
    _run(kernel, merged, merged.data_ptr(), gated.data_ptr(), width // 2)
    return gated


def _fields(norm: RMSNorm | None) -> tuple[int, int, int]:
    """Return the address of a norm's weights, and its numbers."""
    return _NO_NORM if norm is None else (norm.weight.data_ptr(), float_bits(norm.eps), float_bits(norm.offset))


def _run(kernel: Kernel, x: torch.Tensor, *fields: int) -> None:
    """Call a kernel for all rows of x."""
    assert x.is_contiguous()
    run_rows(kernel, x.shape[0], x.numel(), fields)
