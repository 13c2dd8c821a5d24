"""Root mean square norms. Statistics are in float32 whatever the dtype; the order of casts is transformers'."""

from __future__ import annotations

import torch
from torch import nn

from girih.layers.operations import WithOperations


class RMSNorm(WithOperations):
    """x / rms(x) * weight, rounded to the input's dtype before the weight (Zhang and Sennrich 2019, as in llama).

    Args:
        size: elements of the last dimension.
        eps: added to the mean square.
        dtype: of the weight.
    """

    offset = 0.0
    """Added to the weight."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device="meta"))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of x: [..., size] -> [..., size]."""
        return self.weight * _normalise(x, self.eps).to(x.dtype)


class GemmaRMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight), rounded to the input's dtype at the very end (Gemma); arguments as `RMSNorm`."""

    offset = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of x: [..., size] -> [..., size]."""
        return (_normalise(x, self.eps) * (self.offset + self.weight.float())).to(x.dtype)


def _normalise(x: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
