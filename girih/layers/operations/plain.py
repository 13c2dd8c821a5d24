"""The operations of a layer in torch; see `girih.layers.operations.Operations` for what each does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from girih.layers.rotary import apply_rotary

if TYPE_CHECKING:
    from girih.layers.norm import RMSNorm

# the names that config.json uses
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": nn.functional.silu,
    "gelu_pytorch_tanh": partial(nn.functional.gelu, approximate="tanh"),
}


def add(x: torch.Tensor, delta: torch.Tensor, after: RMSNorm | None) -> torch.Tensor:
    """Add to the residual stream, what goes through a norm before or as it is."""
    return x + (delta if after is None else after(delta))


def add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, after: RMSNorm | None, norm: RMSNorm, _to: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add to the residual stream, and normalise the sum."""
    if delta is not None:
        x = add(x, delta, after)
    return x, norm(x)


def split_heads(
    merged: torch.Tensor,
    num_heads: tuple[int, int, int],
    head_dim: int,
    cos_sin: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[RMSNorm, RMSNorm] | None,
) -> Sequence[torch.Tensor]:
    """Take apart queries, keys and values, and turn queries and keys by their angles."""
    query, key, value = merged.view(merged.shape[0], sum(num_heads), head_dim).split(num_heads, dim=1)
    if norms is not None:
        query, key = (norm(part) for norm, part in zip(norms, (query, key), strict=True))
    return apply_rotary(query, *cos_sin), apply_rotary(key, *cos_sin), value


def gate(activation: str, merged: torch.Tensor) -> torch.Tensor:
    """Return activation(gate) * up."""
    gate, up = merged.chunk(2, dim=1)
    return ACTIVATIONS[activation](gate) * up
