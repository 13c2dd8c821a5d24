"""`RotaryHeads`: from what the merged projection gives to queries, keys and values, head by head."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from girih.layers.norm import RMSNorm
from girih.layers.operations import WithOperations


class RotaryHeads(WithOperations):
    """Takes apart queries, keys and values; those of queries and keys are turned by their positions.

    Args:
        sizes: columns of queries, of keys and of values.
        head_dim: elements of a head.
    """

    def __init__(self, sizes: Sequence[int], head_dim: int):
        super().__init__()
        queries, keys, values = (size // head_dim for size in sizes)
        self.num_heads, self.head_dim = (queries, keys, values), head_dim

    def forward(
        self,
        merged: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[RMSNorm, RMSNorm] | None = None,
    ) -> Sequence[torch.Tensor]:
        """Return queries, keys and values, [num_tokens, heads, head_dim] each.

        Args:
            merged: [num_tokens, sum of sizes]; may be changed in place.
            cos_sin: as `RotaryEmbedding.cos_sin` returns it.
            norms: of the heads of queries and of keys, before they are turned.
        """
        return self.operations.split_heads(merged, self.num_heads, self.head_dim, cos_sin, norms)
