"""The gated MLP and its activations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from girih.layers.linear import RowLinear
from girih.layers.merged import MergedLinear
from girih.layers.parallel import ALONE, Ranks

# the names that config.json uses
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": nn.functional.silu,
    "gelu_pytorch_tanh": partial(nn.functional.gelu, approximate="tanh"),
}


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)) (Shazeer 2020).

    Args:
        hidden_size: width of input and output.
        intermediate_size: width inside.
        activation: a name in `ACTIVATIONS`.
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
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to the same shape."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=1)
        return self.down_proj(self.activation(gate) * up)
