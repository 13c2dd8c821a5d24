"""The small operations between the products of a layer, several in one; a file for each way to compute them.

    plain.py      torch, on every device and for every dtype: the truth
    compiled.py   one pass over memory, and one call, where the processor is the device

A device says which it takes (`girih.device.Device.layer_operations`). Layers that have such operations are
`WithOperations`; models need to know nothing of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from girih.layers.module import Module
from girih.layers.operations import plain

if TYPE_CHECKING:
    from girih.layers.norm import RMSNorm


class Operations(Protocol):
    """What a module in this package offers; tensors are contiguous.

    The result for a token has the same bits whatever tokens are beside it.
    """

    def add(self, x: torch.Tensor, delta: torch.Tensor, after: RMSNorm | None) -> torch.Tensor:
        """Return x + after(delta), or x + delta, with the bits that `add_norm` adds; x may be changed in place."""

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, after: RMSNorm | None, norm: RMSNorm, to: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add to the residual stream, and normalise the sum.

        Args:
            x: [num_tokens, hidden_size]; may be changed in place.
            delta: as x; None: nothing is added.
            after: norm that delta goes through before it is added, or None.
            norm: of the sum.
            to: as x; where the sum through `norm` may be written.

        Returns:
            The sum, which may be x itself, and the sum through `norm`.
        """

    def split_heads(
        self,
        merged: torch.Tensor,
        num_heads: tuple[int, int, int],
        head_dim: int,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[RMSNorm, RMSNorm] | None,
    ) -> Sequence[torch.Tensor]:
        """Take apart queries, keys and values, and turn queries and keys by their angles.

        Args:
            merged: [num_tokens, heads of all three * head_dim]; may be changed in place.
            num_heads: of queries, of keys and of values.
            head_dim: elements of a head.
            cos_sin: as `RotaryEmbedding.cos_sin` returns them.
            norms: of the heads of queries and of keys, before they are turned.

        Returns:
            Three tensors [num_tokens, heads, head_dim], which may be views of `merged`.
        """

    def gate(self, activation: str, merged: torch.Tensor) -> torch.Tensor:
        """Return activation(gate) * up.

        Args:
            activation: a name in `plain.ACTIVATIONS`.
            merged: [num_tokens, 2 * inside], gate before up.

        Returns:
            [num_tokens, inside].
        """


class WithOperations(Module):
    """A layer with such operations; `girih.models.build_model` gives it those of the device."""

    operations: Operations = plain
