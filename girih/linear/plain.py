"""Weights as they are, multiplied by torch: for any device, and the truth in tests."""

from __future__ import annotations

import torch
from torch import nn

from girih.linear import Matrix


class PlainMatrix(Matrix):
    """A weight as it is.

    Args:
        weight: [out_features, in_features].
    """

    keeps_weight = True

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.weight = weight

    def product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return x @ weight.T + bias; see `Matrix`."""
        if dtype in (None, x.dtype):
            return nn.functional.linear(x, self.weight, bias)
        result = nn.functional.linear(x.to(dtype), self.weight.to(dtype))
        return result if bias is None else result + bias

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight; see `Matrix`."""
        return nn.functional.embedding(indices, self.weight)


MATRIX = PlainMatrix
