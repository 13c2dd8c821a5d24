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
    """Return x @ weight.T + bias of many rows."""
    if weight.dtype is torch.float32 and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return torch.nn.functional.linear(x, weight, bias)


MATRIX = CpuMatrix
