"""Weights as they are on the CPU: a compiled kernel multiplies few rows, oneDNN many.

For few rows the time is that of reading the weight. torch's products of 2 to 32 float32 rows read it at a third to two
thirds of the memory's speed, and those of bfloat16 take longer than the same in float32. For many rows, torch's own
choice is MKL, which is as fast as oneDNN on processors of its maker, and half as fast on others.
"""

from __future__ import annotations

import torch

from girih.device.cpu import multiplies_bfloat16
from girih.kernels.convert import converted
from girih.kernels.kernel import Kernel
from girih.kernels.threads import deal_out
from girih.linear._cpu_kernel import BFLOAT16, FLOAT32, chunk_columns, num_threads
from girih.linear._products import WEIGHT_ROWS
from girih.linear.plain import PlainMatrix

FEW_ROWS = 32
"""Up to so many rows the kernel is faster than torch's float32."""

FEW_NATIVE_ROWS = 4
"""The same where the processor multiplies bfloat16 matrices itself."""

# rows of a weight that are turned into float32 at once: they stay in the processor's cache, and a large vocabulary
# needs no second copy of its weight
FLOAT32_WEIGHT_ROWS = 1 << 11

# oneDNN makes a kernel for each number of rows, in milliseconds, and keeps a thousand of them, of 0.7 MB each: so there
# are only nine numbers of rows. Up to WHOLE_ROWS are multiplied together, as reading the weight is what takes time.
LEAST_ROWS, WHOLE_ROWS, MOST_ROWS = 8, 64, 2048

_KERNELS: dict[torch.dtype, Kernel] = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}


class CpuMatrix(PlainMatrix):
    """A weight as it is.

    A row's result is the same beside any few others, and beside any many; between the two it can differ in the last
    bits, as the order of sums is another.

    Args:
        weight: [out_features, in_features], float32 or bfloat16.
    """

    def __init__(self, weight: torch.Tensor):
        super().__init__(weight)
        by_float32 = weight.dtype == torch.bfloat16 and not multiplies_bfloat16()
        self._many_by_float32 = by_float32
        self._few = FEW_ROWS if by_float32 or weight.dtype == torch.float32 else FEW_NATIVE_ROWS
        if weight.shape[0] % WEIGHT_ROWS or weight.shape[1] % 16 or not weight.is_contiguous():
            self._few = 0
        # at hand, as a module looks parameters up slowly
        self._kernel, self._address, self._num_numbers = _KERNELS[weight.dtype], weight.data_ptr(), weight.numel()
        self._num_columns, self._size = weight.shape

    def product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return x @ weight.T + bias; see `Matrix`."""
        if 0 < x.shape[0] <= self._few:
            result, wanted = self._multiply_few(x), dtype or x.dtype
            return result if bias is None and wanted is torch.float32 else converted(result, wanted, bias=bias)
        if self._many_by_float32 or dtype not in (None, x.dtype):
            return self._multiply_by_float32(x, bias, dtype or x.dtype)
        return _multiply_many(x, self.weight, bias)

    def _multiply_few(self, x: torch.Tensor) -> torch.Tensor:
        """Return the float32 products of few rows."""
        if x.dtype is not torch.float32 or not x.is_contiguous():
            x = converted(x, torch.float32)
        num_rows = x.shape[0]
        threads = num_threads(num_rows * self._num_numbers)
        result = torch.empty(num_rows, self._num_columns)
        chunk = chunk_columns(self._num_columns, threads, WEIGHT_ROWS)
        fields = (
            x.data_ptr(), num_rows, self._size, self._address, self._num_columns, chunk, result.data_ptr()
        )  # fmt: skip
        deal_out(self._kernel, fields, threads)
        return result

    def _multiply_by_float32(self, x: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Turn the weight into float32 part by part, round once."""
        exact = x.float()
        result = x.new_empty(x.shape[0], self.weight.shape[0], dtype=dtype)
        for start in range(0, self.weight.shape[0], FLOAT32_WEIGHT_ROWS):
            part = slice(start, start + FLOAT32_WEIGHT_ROWS)
            part_bias = None if bias is None else bias[part].float()
            result[:, part] = _multiply_many(exact, self.weight[part].float(), part_bias)
        return result


def _multiply_many(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x @ weight.T + bias of many rows, part by part; a row's bits are the same whatever part it is in."""
    num_rows = x.shape[0]
    if _part_rows(num_rows) == num_rows:
        return _multiply_part(x, weight, bias)
    result = x.new_empty(num_rows, weight.shape[0])
    start = 0
    while start < num_rows:
        size = _part_rows(num_rows - start)
        part = x[start : start + size]
        if len(part) < size:
            part = torch.nn.functional.pad(part, (0, 0, 0, size - len(part)))
        result[start : start + size] = _multiply_part(part, weight, bias)[: num_rows - start]
        start += size
    return result


def _part_rows(num_rows: int) -> int:
    """Return how many of some rows to multiply next, a power of two: of few rows all, and zeros behind them."""
    if num_rows <= WHOLE_ROWS:
        return max(LEAST_ROWS, 1 << (num_rows - 1).bit_length())
    return min(MOST_ROWS, 1 << num_rows.bit_length() - 1)


def _multiply_part(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return torch.nn.functional.linear(x, weight, bias)


MATRIX = CpuMatrix
