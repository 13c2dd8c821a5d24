"""`MergedLinear`: projections of the same input as one product, which reads its input once and is one call.

checkpoint     q_proj.weight [576, 576]      k_proj.weight [192, 576]      v_proj.weight [192, 576]
here                       qkv_proj.weight [960, 576], their rows one behind the other
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from girih.layers.linear import Linear


class MergedLinear(Linear):
    """Several linear layers of one input, of each of which a rank computes some columns of the result.

    Args:
        in_features: width of the input.
        parts: the layers by their names in the checkpoint, where they stand beside this one; of the result of each
            whole layer, the columns that this rank computes.
        bias: whether they have one.
        dtype: of weights and biases.
    """

    def __init__(self, in_features: int, parts: Mapping[str, range], *, bias: bool, dtype: torch.dtype):
        super().__init__(in_features, sum(map(len, parts.values())), bias=bias, dtype=dtype)
        self.parts = {name: slice(columns.start, columns.stop) for name, columns in parts.items()}
        self.sizes = [len(columns) for columns in parts.values()]
        """Columns of each in the result, in order."""
