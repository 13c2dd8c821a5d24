"""Linear and embedding layers, made without memory: the loader puts the checkpoint's tensors in.

A layer that tensor-parallel ranks share holds its rank's part of the weight, and says which part that is: `part_of`.

    MergedLinear    some rows of each weight, so some columns of each result; nothing is exchanged (`merged.py`)
    RowLinear       some columns of the weight: the results of all ranks are summed
    Vocabulary      some rows, those of the rank's token ids: rows looked up are summed, logits are gathered
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from girih.layers.module import Module
from girih.layers.parallel import ALONE, Ranks
from girih.linear import Matrix
from girih.units import cdiv


class Linear(Module, nn.Linear):
    """A linear layer with a weight [out_features, in_features] that has no memory yet.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        bias: whether there is one.
        dtype: of weight and bias.
    """

    matrix: Matrix
    """The weight as it is multiplied; where that is another form, `weight` is None."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype):
        super().__init__(in_features, out_features, bias=bias, dtype=dtype, device="meta")

    def keep_as(self, form: Callable[[torch.Tensor], Matrix]) -> None:
        """Put the weight, which must be there, in the form in which it is multiplied."""
        self.matrix = form(self.weight.data)
        if not self.matrix.keeps_weight:
            self.weight = None  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [num_rows, in_features] to [num_rows, out_features], in the dtype of x."""
        return self.matrix.product(x, self.bias)


class RowLinear(Linear):
    """A linear layer of which a rank takes some columns of the input; the ranks' results are summed.

    Sums are rounded to the dtype of x once, with the bias in them, like those of one rank.

    Args:
        columns: of the whole layer's input, those that this rank has.
        out_features: width of the output.
        bias: whether there is one.
        dtype: of weight and bias.
        ranks: the ranks.
    """

    def __init__(self, columns: range, out_features: int, *, bias: bool, dtype: torch.dtype, ranks: Ranks):
        super().__init__(len(columns), out_features, bias=bias, dtype=dtype)
        self.columns = slice(columns.start, columns.stop)
        self.ranks = ranks

    def part_of(self, parameter: str) -> tuple[slice, ...]:
        """Return which part of the checkpoint's tensor a parameter is: the weight's second dimension, all of a bias."""
        return (slice(None), self.columns) if parameter == "weight" else ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map this rank's columns [num_rows, len(columns)] to the whole [num_rows, out_features], on every rank."""
        if self.ranks.size == 1:
            return super().forward(x)
        # an unrounded share, as the sum is rounded: so results are one rank's, but for the order of the sum
        total = self.ranks.all_reduce(self.matrix.product(x, dtype=torch.float32))
        return (total if self.bias is None else total + self.bias.float()).to(x.dtype)


class Vocabulary(Module):
    """A row for each token id, shared out to the ranks: an embedding, an output layer, or both.

    Args:
        vocab_size: token ids.
        hidden_size: width of a row.
        dtype: of the weight.
        ranks: the ranks.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, ranks: Ranks = ALONE):
        super().__init__()
        self.vocab_size = vocab_size
        self.ranks = ranks
        self.token_ids = ranks.share_vocabulary(vocab_size)
        self.hidden_size, self.dtype = hidden_size, dtype
        self.weight: nn.Parameter | None = nn.Parameter(
            torch.empty(len(self.token_ids), hidden_size, dtype=dtype, device="meta")
        )

    matrix: Matrix
    """See `Linear`."""

    def part_of(self, _parameter: str) -> tuple[slice, ...]:
        """Return which part of the checkpoint's tensor the weight is: rows."""
        return (slice(self.token_ids.start, self.token_ids.stop),)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Map int64 [num_tokens] to [num_tokens, hidden_size], on every rank."""
        if self.ranks.size == 1:
            return self.matrix.rows(token_ids)
        mine = (token_ids >= self.token_ids.start) & (token_ids < self.token_ids.stop)
        rows = torch.zeros(token_ids.shape[0], self.hidden_size, dtype=self.dtype)
        rows[mine] = self.matrix.rows(token_ids[mine] - self.token_ids.start)
        return self.ranks.all_reduce(rows)  # one rank has a row, the others zeros: exact

    def keep_as(self, form: Callable[[torch.Tensor], Matrix]) -> None:
        """Put the weight, which must be there, in the form in which it is multiplied."""
        assert self.weight is not None
        self.matrix = form(self.weight.data)
        if not self.matrix.keeps_weight:
            self.weight = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return the product of each token id's row with hidden states, as an output layer.

        Args:
            hidden: [n, hidden_size].

        Returns:
            float32 [n, vocab_size] on the first rank, None on the others.
        """
        mine = self.matrix.product(hidden)
        padding = cdiv(self.vocab_size, self.ranks.size) - mine.shape[1]  # the last ranks may have fewer ids
        every = self.ranks.gather(nn.functional.pad(mine, (0, padding)) if padding else mine, dim=1)
        return None if every is None else every[:, : self.vocab_size].float()
