"""Weights as int8 with a scale for each row of the weight; activations as whole numbers with a scale for each token.

A weight is rounded to multiples of its row's largest number / 127, a token's activations to 15 bits: that costs little
where reading the weight takes the time, and leaves the weights' 8 bits as the only ones that matter. Sums of products
are exact, in int32, nothing saturates, and so a token's result has the same bits beside any others. A quarter of
float32's memory; how much less exact is in docs/performance.md.
"""

from __future__ import annotations

import torch
from torch import nn

from girih.kernels.lanes import LANES
from girih.kernels.threads import deal_out
from girih.linear import Matrix
from girih.linear._cpu_kernel import INT8, QUANTISE, chunk_columns, num_threads
from girih.linear._products import PANEL
from girih.units import cdiv, round_up

LARGEST = 127.0

PANELS_AT_ONCE = 16
"""Of a weight, that are made at once."""

MANY_ROWS = 32
"""From so many rows of activations on several threads round them."""


class Int8Matrix(Matrix):
    """A weight as int8, in panels as `_products.py` reads them, with zeros around it.

    Args:
        weight: [out_features, in_features], float32 or bfloat16; not kept.
    """

    keeps_weight = False

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        (num_rows, size), self.dtype = weight.shape, weight.dtype
        self.num_rows, self.size = num_rows, size
        num_panels, width = cdiv(num_rows, PANEL), round_up(size, LANES)
        panels = torch.zeros(num_panels, width // 2, PANEL, 2, dtype=torch.int8)
        scales = torch.zeros(num_panels * PANEL)
        for first in range(0, num_panels, PANELS_AT_ONCE):
            rows = slice(first * PANEL, (first + PANELS_AT_ONCE) * PANEL)
            part = weight[rows].float()
            part = nn.functional.pad(part, (0, width - size, 0, -part.shape[0] % PANEL))
            scale = part.abs().amax(dim=1) / LARGEST
            values = (part / scale.where(scale > 0, 1).unsqueeze(1)).round().to(torch.int8)
            scales[rows] = scale
            panels[first : first + PANELS_AT_ONCE] = values.view(-1, PANEL, width // 2, 2).transpose(1, 2)
        self.panels = nn.Parameter(panels, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        # at hand, as a module looks parameters up slowly
        self._num_columns = scales.numel()
        self._panels, self._scales = panels.data_ptr(), scales.data_ptr()

    def product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return x @ weight.T + bias, of rounded numbers; see `Matrix`."""
        rows, x_scales = quantise(x.to(torch.float32))
        num_rows, width = rows.shape
        threads = num_threads(num_rows * width * self._num_columns)
        result = torch.empty(num_rows, self._num_columns)
        fields = (
            x_scales.data_ptr(), self._scales, rows.data_ptr(), num_rows, width, self._panels,
            self._num_columns, chunk_columns(self._num_columns, threads, PANEL), result.data_ptr(),
        )  # fmt: skip
        deal_out(INT8, fields, threads)
        if self._num_columns > self.num_rows:
            result = result[:, : self.num_rows].contiguous()
        if bias is not None:
            result += bias
        return result.to(dtype or x.dtype)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight, of rounded numbers; see `Matrix`."""
        values = self.panels[indices // PANEL, :, indices % PANEL].flatten(1)[:, : self.size]
        return (values * self.scales[indices].unsqueeze(1)).to(self.dtype)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row to multiples of its largest number / `X_STEPS`.

    Args:
        x: float32 [num_rows, size].

    Returns:
        int16 [num_rows, size in whole vectors]; float32 [num_rows], the scales: no number where any of
        the row is not finite.
    """
    if missing := -x.shape[1] % LANES:
        x = nn.functional.pad(x, (0, missing))
    x = x.contiguous()
    num_rows, size = x.shape
    result, scales = torch.empty(num_rows, size, dtype=torch.int16), torch.empty(num_rows)
    threads = torch.get_num_threads() if num_rows >= MANY_ROWS else 1
    fields = (
        x.data_ptr(), num_rows, size, result.data_ptr(), scales.data_ptr(), cdiv(max(1, num_rows), 4 * threads)
    )  # fmt: skip
    deal_out(QUANTISE, fields, threads)
    return result, scales


MATRIX = Int8Matrix
