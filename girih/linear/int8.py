"""Weights as int8 with a scale for each row of the weight; activations as whole numbers with a scale for each token.

A weight is rounded to multiples of its row's largest number / 127, a token's activations to 15 bits: that costs little
where reading the weight takes the time, and leaves the weights' 8 bits as the only ones that matter. Sums of products
are exact, in int32, nothing saturates, and so a token's result has the same bits beside any others. A quarter of
float32's memory; how much less exact is in docs/performance.md.
"""

from __future__ import annotations

import torch
from torch import nn

from girih.kernels.convert import converted
from girih.kernels.lanes import LANES
from girih.kernels.processor import multiplies_int8
from girih.kernels.threads import deal_out
from girih.linear import Matrix
from girih.linear._cpu_kernel import chunk_columns, num_threads
from girih.linear._int8_kernel import INT8, INT8_TILES, QUANTISE, scratch_bytes
from girih.linear._int8_products import PANEL, QUAD
from girih.linear._int8_tiles import SHAPES, TILE_COLUMNS, TILE_ROWS
from girih.units import cdiv, round_up

LARGEST = 127.0

PANELS_AT_ONCE = 16
"""Of a weight, that are made at once."""

FEW_ROWS = 16
"""Up to so many rows of activations are rounded by each thread that multiplies them."""

MANY_ROWS = 32
"""From so many rows of activations on several threads round them."""


FEW_TILE_ROWS = 4
"""Up to so many rows of activations are multiplied without a matrix unit, where there is one."""


class Int8Matrix(Matrix):
    """A weight as int8, in panels as `_int8_products.py` and `_int8_tiles.py` read them, with zeros around it.

    Args:
        weight: [out_features, in_features], float32 or bfloat16; not kept.
    """

    keeps_weight = False

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        (num_rows, size), self.dtype = weight.shape, weight.dtype
        self.num_rows, self.size = num_rows, size
        num_panels, width = cdiv(num_rows, PANEL), round_up(size, TILE_COLUMNS)
        panels = torch.zeros(num_panels, width // QUAD, PANEL, QUAD, dtype=torch.int8)
        scales = torch.zeros(num_panels * PANEL)
        for first in range(0, num_panels, PANELS_AT_ONCE):
            rows = slice(first * PANEL, (first + PANELS_AT_ONCE) * PANEL)
            part = weight[rows].float()
            part = nn.functional.pad(part, (0, width - size, 0, -part.shape[0] % PANEL))
            scale = part.abs().amax(dim=1) / LARGEST
            values = (part / scale.where(scale > 0, 1).unsqueeze(1)).round()
            values = values.clamp_(-LARGEST, LARGEST).to(torch.int8)  # the scale of tiny numbers is rounded itself
            scales[rows] = scale
            panels[first : first + PANELS_AT_ONCE] = values.view(-1, PANEL, width // QUAD, QUAD).transpose(1, 2)
        self.panels = nn.Parameter(panels, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        # at hand, as a module looks parameters up slowly
        self._num_columns, self._width = scales.numel(), width
        self._panels, self._scales = panels.data_ptr(), scales.data_ptr()

    def product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return x @ weight.T + bias, of rounded numbers; see `Matrix`."""
        exact = self._in_whole_vectors(x)
        num_rows, size = exact.shape
        by_tiles = num_rows > FEW_TILE_ROWS and multiplies_int8()
        threads = num_threads(num_rows * size * self._num_columns)
        result = torch.empty(num_rows, self._num_columns)
        one_scratch = scratch_bytes(min(num_rows, FEW_ROWS), self._width)
        scratch = torch.empty(threads * one_scratch, dtype=torch.uint8)
        if num_rows <= FEW_ROWS:
            given = (0, 0, exact.data_ptr())
        else:
            rows, x_scales = quantise(exact, self._width, in_halves=by_tiles)
            given = (rows.data_ptr(), x_scales.data_ptr(), 0)
        fields = (
            *given, scratch.data_ptr(), one_scratch, num_rows, size, self._width,
            self._panels, self._scales, self._num_columns, chunk_columns(self._num_columns, threads, PANEL),
            result.data_ptr(), _SHAPES, 0,
        )  # fmt: skip
        deal_out(INT8_TILES if by_tiles else INT8, fields, threads)
        wanted = dtype or x.dtype
        if bias is None and wanted is torch.float32 and self._num_columns == self.num_rows:
            return result
        return converted(result, wanted, self.num_rows, bias)

    def _in_whole_vectors(self, x: torch.Tensor) -> torch.Tensor:
        """Return activations in float32, contiguous, with zeros behind them where their size is not whole vectors."""
        if x.dtype is torch.float32 and self.size % LANES == 0 and x.is_contiguous():
            return x
        return converted(x, torch.float32, round_up(self.size, LANES))

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight, of rounded numbers; see `Matrix`."""
        values = self.panels[indices // PANEL, :, indices % PANEL].flatten(1)[:, : self.size]
        return (values * self.scales[indices].unsqueeze(1)).to(self.dtype)


def quantise(x: torch.Tensor, width: int, *, in_halves: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row to multiples of its largest number / `X_STEPS`.

    Args:
        x: float32 [num_rows, size], contiguous; size in whole vectors.
        width: of the result: zeros follow.
        in_halves: whether upper bytes of a row come before lower ones.

    Returns:
        int16 [num_rows, width]; float32 [num_rows], the scales: no number where any of the row is not finite. Behind
        the rows there is room for those of a whole tile.
    """
    num_rows, size = x.shape
    room, scales = torch.empty(round_up(num_rows, TILE_ROWS), width, dtype=torch.int16), torch.empty(num_rows)
    threads = torch.get_num_threads() if num_rows >= MANY_ROWS else 1
    fields = (
        x.data_ptr(), num_rows, size, width, room.data_ptr(), int(in_halves), scales.data_ptr(),
        cdiv(max(1, num_rows), 4 * threads),
    )  # fmt: skip
    deal_out(QUANTISE, fields, threads)
    return room[:num_rows], scales


_SHAPES = SHAPES.ctypes.data

MATRIX = Int8Matrix
