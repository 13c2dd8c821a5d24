"""Products of some rows and a part of a weight, compiled, with up to 16 sums of 16 lanes in registers.

Of float32 and bfloat16, a weight lies in memory as in the checkpoint, [out, in]: lanes are columns of the weight, and
are summed up at last. Of int8, lanes are rows of the weight, two columns of 64 rows lie together: nothing is summed up
at last, and one row of activations reads the weight from front to back.

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
    BITS,
    FLOAT,
    INT,
    LANES,
    VECTOR,
    bring_near,
    constant,
    fma,
    intrinsic,
    place,
    pointer,
    read,
    spread,
    sum_each,
)

WEIGHT_ROWS = 4
PANEL = 64
"""Columns of the result whose int8 weights lie together."""

X_STEPS = 16383
"""Activations beside int8 are whole numbers up to this: 15 bits, as 8 would cost more than the weights' 8."""

EXACT_COLUMNS = 1024
"""Of products of X_STEPS and 127 so many can be summed up in 32 bits."""

_WORD = ir.IntType(64)
_FOUR = ir.VectorType(FLOAT, WEIGHT_ROWS)
_AHEAD_ROWS = 8
"""So many rows ahead a weight is brought near, where several rows are multiplied: one row alone reads in order."""


def _sums(
    builder: Any, zero: Any, rows: int, size: Any, step: int, body: Callable[[Any, list[Any]], None]
) -> list[Any]:
    """Run `body(column, sums)` for each `step` columns; return the sums of rows x 4, row by row."""
    sums = [cgutils.alloca_once_value(builder, zero) for _ in range(rows * WEIGHT_ROWS)]
    with cgutils.for_range(builder, builder.udiv(size, _WORD(step))) as loop:
        body(builder.mul(loop.index, _WORD(step)), sums)
    return [builder.load(total) for total in sums] + [zero] * (LANES - len(sums))


def _starts(builder: Any, address: Any, row_bytes: Any, rows: int) -> list[Any]:
    return [builder.add(address, builder.mul(row_bytes, _WORD(i))) for i in range(rows)]


def _part(builder: Any, sixteen: Any, row: int) -> Any:
    """Return the four sums of one row."""
    order = list(range(row * WEIGHT_ROWS, (row + 1) * WEIGHT_ROWS))
    return builder.shuffle_vector(sixteen, sixteen, ir.Constant(ir.VectorType(INT, WEIGHT_ROWS), order))


def _products(rows: int) -> Any:
    """Return the function for so many rows, 1 to 4."""

    @intrinsic
    def products(
        _typing: Any, x: Any, x_bytes: Any, weight: Any, weight_bytes: Any, size: Any, kind: Any, output: Any,
        output_bytes: Any,
    ) -> Any:  # fmt: skip
        """Write the products of float32 rows [rows, size] and a weight's [4, size]; size is whole vectors."""

        def _multiply(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            x, x_bytes, weight, weight_bytes, size, _, output, output_bytes = args
            element = kind.instance_type
            xs, ws = _starts(builder, x, x_bytes, rows), _starts(builder, weight, weight_bytes, WEIGHT_ROWS)
            ahead = builder.mul(weight_bytes, _WORD(_AHEAD_ROWS))

            def step(column: Any, sums: list[Any]) -> None:
                here = [place(builder, at, column, element.bitwidth // 8) for at in ws]
                if rows > 1:
                    for at in here:
                        bring_near(builder, builder.add(at, ahead))
                w = [read(builder, at, element) for at in here]
                for i, at in enumerate(xs):
                    one = read(builder, place(builder, at, column, 4), types.float32)
                    for j in range(WEIGHT_ROWS):
                        total = sums[i * WEIGHT_ROWS + j]
                        builder.store(fma(builder, one, w[j], builder.load(total)), total)

            sixteen = sum_each(builder, _sums(builder, constant(0.0), rows, size, LANES, step))
            for i, at in enumerate(_starts(builder, output, output_bytes, rows)):
                builder.store(_part(builder, sixteen, i), pointer(builder, at, _FOUR), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5, kind, *[types.int64] * 2), _multiply

    return products


def _int8_products(rows: int) -> Any:
    """Return the function for so many rows and a weight of int8, 1 to 4."""

    @intrinsic
    def products(
        _typing: Any, x: Any, x_bytes: Any, first: Any, size: Any, panel: Any, output: Any, output_bytes: Any
    ) -> Any:
        """Add the products of int16 rows and a panel of a weight to float32 [rows, 64], before any scale.

        Columns first .. first + size of x, which are even numbers, at most `EXACT_COLUMNS`: their sums are exact. The
        panel, of these columns, is int8 [size / 2, 64, 2]: two columns of each of 64 rows of the weight.
        """

        def _multiply(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            x, x_bytes, first, size, panel, output, output_bytes = args
            xs = _starts(builder, builder.add(x, builder.mul(first, _WORD(2))), x_bytes, rows)
            ahead = builder.mul(x_bytes, _WORD(PANEL // 2))  # the next panel comes near while rows meet this one
            bytes_, shorts = (ir.VectorType(ir.IntType(bits), 2 * LANES) for bits in (8, 16))

            def step(column: Any, sums: list[Any]) -> None:
                here = builder.add(panel, builder.mul(column, _WORD(PANEL)))
                pieces = _starts(builder, here, _WORD(2 * LANES), WEIGHT_ROWS)
                if rows > 1:
                    for at in pieces[::2]:
                        bring_near(builder, builder.add(at, ahead))
                w = [builder.sext(builder.load(pointer(builder, at, bytes_), align=1), shorts) for at in pieces]
                for i, at in enumerate(xs):
                    pair = builder.load(pointer(builder, place(builder, at, column, 2), INT), align=2)
                    one = builder.bitcast(spread(builder, pair), shorts)
                    for j in range(WEIGHT_ROWS):
                        total = sums[i * WEIGHT_ROWS + j]
                        builder.store(_add_pairs(builder, builder.load(total), one, w[j]), total)

            sums = _sums(builder, ir.Constant(BITS, [0] * LANES), rows, size, 2, step)
            for i, to in enumerate(_starts(builder, output, output_bytes, rows)):
                for j in range(WEIGHT_ROWS):
                    at = builder.add(to, _WORD(j * LANES * 4))
                    exact = builder.sitofp(sums[i * WEIGHT_ROWS + j], VECTOR)
                    result = builder.fadd(read(builder, at, types.float32), exact)
                    builder.store(result, pointer(builder, at, VECTOR), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), _multiply

    return products


def _add_pairs(builder: Any, total: Any, x: Any, weight: Any) -> Any:
    """Add the products of 32 numbers of 16 bits to 16 sums, in pairs: one or two instructions, which LLVM finds."""
    wide = ir.VectorType(INT, 2 * LANES)
    even, odd = (ir.Constant(BITS, list(range(start, 2 * LANES, 2))) for start in (0, 1))
    products = builder.mul(builder.sext(x, wide), builder.sext(weight, wide), flags=("nsw",))
    neighbours = [builder.shuffle_vector(products, products, order) for order in (even, odd)]
    return builder.add(total, builder.add(*neighbours, flags=("nsw",)))


@intrinsic
def store_shorts(_typing: Any, address: Any, lanes: Any) -> Any:
    """Write 16 numbers, rounded, as int16; what is beyond `X_STEPS`, and no numbers too, become the nearest."""

    def _write(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        address, numbers = args
        least, most = constant(float(-X_STEPS)), constant(float(X_STEPS))
        numbers = builder.select(builder.fcmp_ordered(">", numbers, least), numbers, least)
        numbers = builder.select(builder.fcmp_ordered("<", numbers, most), numbers, most)
        kind = ir.FunctionType(VECTOR, [VECTOR])
        nearest = cgutils.get_or_insert_function(builder.module, kind, "llvm.rint.v16f32")
        whole = builder.fptosi(builder.call(nearest, (numbers,)), BITS)
        sixteen = ir.VectorType(ir.IntType(16), LANES)
        builder.store(builder.trunc(whole, sixteen), pointer(builder, address, sixteen), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, lanes), _write


products1, products2, products3, products4 = map(_products, (1, 2, 3, 4))
int8_products1, int8_products2, int8_products3, int8_products4 = map(_int8_products, (1, 2, 3, 4))
