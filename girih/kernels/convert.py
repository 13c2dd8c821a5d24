"""Rows of numbers in another dtype, compiled: what products and attention take, and what they give.

In torch each of the steps here, turning, adding a bias, cutting off or padding, is a pass and a call of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from girih.kernels.kernel import Kernel
from girih.kernels.lanes import LANES, add, bytes_of, fetch_add, inner, load_some, store_some
from girih.kernels.threads import run_rows

JOB = np.dtype(
    [
        (name, np.int64)
        for name in (
            "num_rows", "rows_at_once",
            "x", "x_bytes", "size",  # address; bytes from row to row; numbers of a row that are read
            "bias", "is_float32",  # address [size], 0 for none; whether it is float32, not bfloat16
            "output", "width",  # address [num_rows, width]; zeros are written where nothing is read
            "counter", "taken",  # address of the other; rows
        )
    ]
)  # fmt: skip


@inner
def _convert_row(job: Any, x: int, output: int, kind: Any, new_kind: Any) -> None:
    for i in range(0, job.width, LANES):
        room = min(job.width, job.size) - i
        numbers = load_some(x + i * bytes_of(kind), room, kind)
        if job.bias:
            if job.is_float32:
                numbers = add(numbers, load_some(job.bias + i * 4, room, np.float32))
            else:
                numbers = add(numbers, load_some(job.bias + i * 2, room, np.uint16))
        store_some(output + i * bytes_of(new_kind), numbers, job.width - i, new_kind)


@inner
def _convert(job: Any, kind: Any, new_kind: Any) -> None:
    """Take rows until none is left."""
    first = fetch_add(job.counter, job.rows_at_once)
    while first < job.num_rows:
        for row in range(first, min(first + job.rows_at_once, job.num_rows)):
            to = job.output + row * job.width * bytes_of(new_kind)
            _convert_row(job, job.x + row * job.x_bytes, to, kind, new_kind)
        first = fetch_add(job.counter, job.rows_at_once)


def _float32(job: Any) -> None:
    _convert(job, np.float32, np.float32)


def _bfloat16(job: Any) -> None:
    _convert(job, np.uint16, np.uint16)


def _narrow(job: Any) -> None:
    _convert(job, np.float32, np.uint16)


def _widen(job: Any) -> None:
    _convert(job, np.uint16, np.float32)


CONVERT = {
    (torch.float32, torch.float32): Kernel(_float32, JOB),
    (torch.bfloat16, torch.bfloat16): Kernel(_bfloat16, JOB),
    (torch.float32, torch.bfloat16): Kernel(_narrow, JOB),
    (torch.bfloat16, torch.float32): Kernel(_widen, JOB),
}
"""By the dtypes of what is read and of what is written."""


def converted(
    x: torch.Tensor, dtype: torch.dtype, width: int | None = None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x + bias in a dtype, rounded once.

    Args:
        x: [num_rows, size], float32 or bfloat16; the numbers of a row lie one behind the other.
        dtype: float32 or bfloat16.
        width: of the result, without the last columns of x, or with zeros behind them; None: `size`.
        bias: [size or more], or None.

    Returns:
        [num_rows, width], contiguous.
    """
    num_rows, size = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    width = width or size
    result = torch.empty(num_rows, width, dtype=dtype)
    fields = (
        x.data_ptr(), x.stride(0) * x.itemsize, size,
        0 if bias is None else bias.data_ptr(), bias is not None and bias.dtype == torch.float32,
        result.data_ptr(), width,
    )  # fmt: skip
    run_rows(CONVERT[x.dtype, dtype], num_rows, result.numel(), fields)
    return result
