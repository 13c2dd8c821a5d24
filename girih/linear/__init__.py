"""Forms in which a weight matrix is kept and multiplied, one file each, found by name; this file is what each offers.

A device names the one that keeps weights as they are; `--quantization` names one that keeps them smaller. Every file
defines `MATRIX`, a class as `Matrix` describes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn


class Matrix(nn.Module, ABC):
    """A weight [out_features, in_features]; made of the checkpoint's tensor."""

    keeps_weight: bool
    """Whether it multiplies the tensor itself, which its layer holds then; else it has parameters instead."""

    @abstractmethod
    def product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return x @ weight.T + bias.

        Args:
            x: [num_rows, in_features].
            bias: [out_features].
            dtype: of the result, float32 or that of x: sums are in float32 and rounded to it once; None: that of x.

        Returns:
            [num_rows, out_features], contiguous.
        """

    @abstractmethod
    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight, [n, in_features] in its own dtype, for int64 [n]."""
