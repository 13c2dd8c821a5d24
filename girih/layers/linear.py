"""Linear and embedding layers, made without memory: the loader puts the checkpoint's tensors in."""

from __future__ import annotations

import torch
from torch import nn

# rows of a weight that are turned into float32 at once: they stay in the processor's cache, and a large vocabulary
# needs no second copy of its weight
FLOAT32_WEIGHT_ROWS = 1 << 11


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, float32_rows: int | None = None
) -> torch.Tensor:
    """Return x @ weight.T + bias.

    A device without bfloat16 arithmetic multiplies many rows several times faster when weight and input are turned
    into float32 first and the result is rounded once, which is also what its bfloat16 product computes, but for the
    order of its sums: so a row's result can differ in the last bit with the number of rows beside it.

    Args:
        x: [num_rows, in_features].
        weight: [out_features, in_features], in the dtype of x.
        bias: [out_features], in the dtype of x.
        float32_rows: from this many rows of x on go by float32; None: never.

    Returns:
        [num_rows, out_features], in the dtype of x.
    """
    if float32_rows is None or x.shape[0] < float32_rows or x.dtype == torch.float32:
        return nn.functional.linear(x, weight, bias)
    exact = x.float()
    result = x.new_empty(x.shape[0], weight.shape[0])
    for start in range(0, weight.shape[0], FLOAT32_WEIGHT_ROWS):
        part = slice(start, start + FLOAT32_WEIGHT_ROWS)
        part_bias = None if bias is None else bias[part].float()
        result[:, part] = nn.functional.linear(exact, weight[part].float(), part_bias)
    return result


class Linear(nn.Linear):
    """A linear layer with a weight [out_features, in_features] that has no memory yet.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        bias: whether there is one.
        dtype: of weight and bias.
    """

    float32_rows: int | None = None
    """See `product`."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype):
        super().__init__(in_features, out_features, bias=bias, dtype=dtype, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [num_rows, in_features] to [num_rows, out_features], in the dtype of x."""
        return product(x, self.weight, self.bias, float32_rows=self.float32_rows)


def embedding(vocab_size: int, hidden_size: int, *, dtype: torch.dtype) -> nn.Embedding:
    """Return an embedding whose weight [vocab_size, hidden_size] has no memory yet."""
    return nn.Embedding(vocab_size, hidden_size, dtype=dtype, device="meta")
