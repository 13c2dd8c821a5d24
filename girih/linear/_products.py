"""Products of some rows and a part of a weight, compiled, with up to 16 sums of 16 lanes in registers.

A weight of float32 or bfloat16 lies in memory as in the checkpoint, [out, in]: lanes are columns of the weight, and are
summed up at last.

Each product is summed in the same order, whatever it is computed beside: so a row's results have the same bits alone
and in any batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from girih.kernels.lanes import (
    FLOAT,
    INT,
    LANES,
    bring_near,
    constant,
    fma,
    intrinsic,
    place,
    pointer,
    read,
    sum_each,
)

WEIGHT_ROWS = 4
WORD = ir.IntType(64)
_FOUR = ir.VectorType(FLOAT, WEIGHT_ROWS)
_AHEAD_ROWS = 8
"""So many rows ahead a weight is brought near."""


def sums_of(
    builder: Any, zero: Any, rows: int, size: Any, step: int, body: Callable[[Any, list[Any]], None]
) -> list[Any]:
    """Run `body(column, sums)` for each `step` columns; return the sums of rows x 4, row by row."""
    sums = [cgutils.alloca_once_value(builder, zero) for _ in range(rows * WEIGHT_ROWS)]
    with cgutils.for_range(builder, builder.udiv(size, WORD(step))) as loop:
        body(builder.mul(loop.index, WORD(step)), sums)
    return [builder.load(total) for total in sums] + [zero] * (LANES - len(sums))


def starts(builder: Any, address: Any, row_bytes: Any, rows: int) -> list[Any]:
    """Return the addresses of some rows, one behind the other."""
    return [builder.add(address, builder.mul(row_bytes, WORD(i))) for i in range(rows)]


def _part(builder: Any, sixteen: Any, row: int) -> Any:
    """Return the four sums of one row."""
    order = list(range(row * WEIGHT_ROWS, (row + 1) * WEIGHT_ROWS))
    return builder.shuffle_vector(sixteen, sixteen, ir.Constant(ir.VectorType(INT, WEIGHT_ROWS), order))


def _products(rows: int) -> Any:
    """Return the function for so many rows, 1 to 4."""

    @intrinsic
    def products(
        _typing: Any, x: Any, x_bytes: Any, weight: Any, weight_bytes: Any, size: Any, kind: Any, output: Any,
        output_bytes: Any, near: Any,
    ) -> Any:  # fmt: skip
        """Write the products of float32 rows [rows, size] and a weight's [4, size]; size is whole vectors.

        Those of four rows further on whose bits are set in `near` are brought near meanwhile.
        """

        def _multiply(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            x, x_bytes, weight, weight_bytes, size, _, output, output_bytes, near = args
            element = kind.instance_type
            xs, ws = starts(builder, x, x_bytes, rows), starts(builder, weight, weight_bytes, WEIGHT_ROWS)
            ahead = builder.mul(weight_bytes, WORD(_AHEAD_ROWS))
            wanted = [builder.trunc(builder.lshr(near, WORD(j)), ir.IntType(1)) for j in range(WEIGHT_ROWS)]
            # where it is here already, to bring it near costs next to nothing
            nears = [builder.add(at, builder.select(want, ahead, WORD(0))) for at, want in zip(ws, wanted, strict=True)]

            def step(column: Any, sums: list[Any]) -> None:
                here = [place(builder, at, column, element.bitwidth // 8) for at in ws]
                for at in nears:
                    bring_near(builder, place(builder, at, column, element.bitwidth // 8))
                w = [read(builder, at, element) for at in here]
                for i, at in enumerate(xs):
                    one = read(builder, place(builder, at, column, 4), types.float32)
                    for j in range(WEIGHT_ROWS):
                        total = sums[i * WEIGHT_ROWS + j]
                        builder.store(fma(builder, one, w[j], builder.load(total)), total)

            sixteen = sum_each(builder, sums_of(builder, constant(0.0), rows, size, LANES, step))
            for i, at in enumerate(starts(builder, output, output_bytes, rows)):
                builder.store(_part(builder, sixteen, i), pointer(builder, at, _FOUR), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5, kind, *[types.int64] * 3), _multiply

    return products


products1, products2, products3, products4 = map(_products, (1, 2, 3, 4))
