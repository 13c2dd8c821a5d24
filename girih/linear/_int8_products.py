"""Products of whole numbers of 16 bits and an int8 weight, compiled, for any processor.

A weight lies in panels: four columns of 32 rows of the weight together. Lanes are pairs of columns of 8 of these rows:
an instruction multiplies 32 numbers and adds neighbours, and one row of activations reads the weight from front to
back. All sums are exact, so their order is free.

    panel [size / 4, 32, 4]   r0c0 r0c1 r0c2 r0c3 | r1c0 r1c1 r1c2 r1c3 | ...     32 bytes at once: 8 rows
    x                         x0   x1   x2   x3   | x0   x1   x2   x3   | ...
    16 sums of 32 bits        x0*r0c0 + x1*r0c1, x2*r0c2 + x3*r0c3 | ...          two for each row, added at last
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from girih.kernels.lanes import (
    BITS,
    INT,
    LANES,
    VECTOR,
    bring_near,
    constant,
    intrinsic,
    place,
    pointer,
    read,
)
from girih.linear._products import WORD, starts, sums_of

PANEL = 32
"""Columns of the result whose weights lie together."""

QUAD = 4
"""Columns of the weight that do."""

X_STEPS = 16383
"""Activations are whole numbers up to this: 15 bits, as 8 would cost more than the weights' 8."""

EXACT_COLUMNS = 1024
"""Of products of X_STEPS and 127 so many can be summed up in 32 bits."""

_PIECES = PANEL * QUAD // (2 * LANES)
_BYTES, _SHORTS = (ir.VectorType(ir.IntType(bits), 2 * LANES) for bits in (8, 16))
_EVEN, _ODD = (ir.Constant(BITS, list(range(start, 2 * LANES, 2))) for start in (0, 1))


def _int8_products(rows: int) -> Any:
    """Return the function for so many rows, 1 to 4."""

    @intrinsic
    def products(
        _typing: Any, x: Any, x_bytes: Any, first: Any, size: Any, panel: Any, output: Any, output_bytes: Any
    ) -> Any:
        """Add the products of int16 rows and a panel of a weight to float32 [rows, 32], before any scale.

        Columns first .. first + size of x, which are multiples of 4, at most `EXACT_COLUMNS`; the panel, of these
        columns, is int8 [size / 4, 32, 4].
        """

        def _multiply(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            x, x_bytes, first, size, panel, output, output_bytes = args
            xs = starts(builder, builder.add(x, builder.mul(first, WORD(2))), x_bytes, rows)
            ahead = builder.mul(x_bytes, WORD(PANEL // 2))  # the next panel comes near meanwhile

            def step(column: Any, sums: list[Any]) -> None:
                pieces = starts(builder, place(builder, panel, column, PANEL), WORD(2 * LANES), _PIECES)
                for at in pieces[::2]:
                    bring_near(builder, builder.add(at, ahead))
                w = [builder.sext(builder.load(pointer(builder, at, _BYTES), align=1), _SHORTS) for at in pieces]
                for i, at in enumerate(xs):
                    here = pointer(builder, place(builder, at, column, 2), WORD)
                    four = _repeated(builder, builder.load(here, align=2))
                    for j in range(_PIECES):
                        total = sums[i * _PIECES + j]
                        builder.store(_add_pairs(builder, builder.load(total), four, w[j]), total)

            sums = sums_of(builder, ir.Constant(BITS, [0] * LANES), rows, size, QUAD, step)
            for i, to in enumerate(starts(builder, output, output_bytes, rows)):
                for j in range(0, _PIECES, 2):
                    at = builder.add(to, WORD(j // 2 * LANES * 4))
                    exact = builder.sitofp(_neighbours(builder, *sums[i * _PIECES + j : i * _PIECES + j + 2]), VECTOR)
                    result = builder.fadd(read(builder, at, types.float32), exact)
                    builder.store(result, pointer(builder, at, VECTOR), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), _multiply

    return products


def _repeated(builder: Any, four: Any) -> Any:
    """Return four numbers of 16 bits, eight times."""
    words = ir.VectorType(WORD, 2 * LANES // QUAD)
    first = builder.insert_element(ir.Constant(words, ir.Undefined), four, INT(0))
    zeros = ir.Constant(ir.VectorType(INT, words.count), [0] * words.count)
    return builder.bitcast(builder.shuffle_vector(first, ir.Constant(words, ir.Undefined), zeros), _SHORTS)


def _add_pairs(builder: Any, total: Any, x: Any, weight: Any) -> Any:
    """Add the products of 32 numbers of 16 bits to 16 sums, in pairs: one or two instructions, which LLVM finds."""
    wide = ir.VectorType(INT, 2 * LANES)
    products = builder.mul(builder.sext(x, wide), builder.sext(weight, wide), flags=("nsw",))
    neighbours = [builder.shuffle_vector(products, products, order) for order in (_EVEN, _ODD)]
    return builder.add(total, builder.add(*neighbours, flags=("nsw",)))


def _neighbours(builder: Any, a: Any, b: Any) -> Any:
    """Return 16 sums of each two neighbours of two vectors."""
    return builder.add(*(builder.shuffle_vector(a, b, order) for order in (_EVEN, _ODD)))


def _whole(builder: Any, numbers: Any) -> Any:
    """Return numbers rounded, 32 bits; what is beyond `X_STEPS`, and no numbers too, become the nearest."""
    least, most = constant(float(-X_STEPS)), constant(float(X_STEPS))
    numbers = builder.select(builder.fcmp_ordered(">", numbers, least), numbers, least)
    numbers = builder.select(builder.fcmp_ordered("<", numbers, most), numbers, most)
    kind = ir.FunctionType(VECTOR, [VECTOR])
    nearest = cgutils.get_or_insert_function(builder.module, kind, "llvm.rint.v16f32")
    return builder.fptosi(builder.call(nearest, (numbers,)), BITS)


def _store_low(builder: Any, address: Any, whole: Any, bits: int) -> None:
    """Write the lowest bits of 16 numbers."""
    kind = ir.VectorType(ir.IntType(bits), LANES)
    builder.store(builder.trunc(whole, kind), pointer(builder, address, kind), align=bits // 8)


@intrinsic
def store_shorts(_typing: Any, address: Any, lanes: Any) -> Any:
    """Write 16 numbers, rounded, as int16."""

    def _write(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _store_low(builder, args[0], _whole(builder, args[1]), 16)
        return context.get_dummy_value()

    return types.void(types.int64, lanes), _write


@intrinsic
def store_halves(_typing: Any, upper: Any, lower: Any, lanes: Any) -> Any:
    """Write 16 numbers, rounded, as int8 * 256 + uint8, each to an address of its own."""

    def _write(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        whole = _whole(builder, args[2])
        _store_low(builder, args[0], builder.ashr(whole, ir.Constant(BITS, [8] * LANES)), 8)
        _store_low(builder, args[1], whole, 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, lanes), _write


int8_products1, int8_products2, int8_products3, int8_products4 = map(_int8_products, (1, 2, 3, 4))
