"""`Residual`: the hidden states that every layer of a decoder reads through a norm and adds to."""

from __future__ import annotations

import torch

from girih.layers.norm import RMSNorm
from girih.layers.operations import Operations, plain


class Residual:
    """The residual stream of a step. What is added waits for the next norm, and both are one operation.

    Args:
        x: [num_tokens, hidden_size]; may be changed in place.
    """

    def __init__(self, x: torch.Tensor):
        self._x = x
        self._normed = torch.empty_like(x)
        self._delta: torch.Tensor | None = None
        self._after: RMSNorm | None = None
        self._operations: Operations = plain

    def add(self, delta: torch.Tensor, after: RMSNorm | None = None) -> None:
        """Add to the stream.

        Args:
            delta: [num_tokens, hidden_size].
            after: norm that it goes through before.
        """
        self._x = self.value()
        self._delta, self._after = delta, after

    def normed(self, norm: RMSNorm) -> torch.Tensor:
        """Return the stream through a norm, [num_tokens, hidden_size]; it is overwritten by the next call."""
        self._operations = norm.operations
        self._x, normed = norm.operations.add_norm(self._x, self._delta, self._after, norm, self._normed)
        self._delta = None
        return normed

    def value(self) -> torch.Tensor:
        """Return the stream, [num_tokens, hidden_size]."""
        if self._delta is not None:
            self._x = self._operations.add(self._x, self._delta, self._after)
            self._delta = None
        return self._x
