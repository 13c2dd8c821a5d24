"""The gated MLP."""

from __future__ import annotations

import torch

from girih.layers.linear import RowLinear
from girih.layers.merged import MergedLinear
from girih.layers.operations import WithOperations
from girih.layers.parallel import ALONE, Ranks


class GatedMLP(WithOperations):
    """down(activation(gate(x)) * up(x)) (Shazeer 2020).

    Args:
        hidden_size: width of input and output.
        intermediate_size: width inside.
        activation: a name in `girih.layers.operations.plain.ACTIVATIONS`.
        bias: whether the three projections have one.
        dtype: of the weights.
        ranks: that share the width inside.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str,
        bias: bool,
        dtype: torch.dtype,
        ranks: Ranks = ALONE,
    ):
        super().__init__()
        inside = ranks.share(intermediate_size)
        parts = {"gate_proj": inside, "up_proj": inside}
        self.gate_up_proj = MergedLinear(hidden_size, parts, bias=bias, dtype=dtype)
        self.down_proj = RowLinear(inside, hidden_size, bias=bias, dtype=dtype, ranks=ranks)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to the same shape."""
        return self.down_proj(self.operations.gate(self.activation, self.gate_up_proj(x)))
