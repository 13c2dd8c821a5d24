"""The same products with the matrix unit of some processors (AMX), 16 rows at a time: several times as fast.

The unit multiplies 8 bits with 8. So activations are given as two planes, x = 256 * upper + lower, and there are two
sums: all exact, and so the bits of the result are those that any other processor computes.

    tiles   0, 1   sums of the upper plane and 16 + 16 columns of a panel, int32 [16, 16]
            2, 3   of the lower plane
            4, 5   upper and lower plane, [16, 64]
            6, 7   the panel, int8 [64 / 4, 16, 4]
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from girih.kernels.lanes import BITS, LANES, LANES_TYPE, VECTOR, bring_near, intrinsic, pointer
from girih.linear._int8_products import PANEL, QUAD
from girih.linear._products import WORD

TILE_ROWS = 16
TILE_COLUMNS = 64
"""Of the weight, that are multiplied at once."""

TILE_BYTES = TILE_ROWS * 64
SUMS_BYTES = 4 * TILE_BYTES

SHAPES_BYTES = 64
SHAPES = np.zeros(SHAPES_BYTES, np.uint8)
"""What the processor is told of the tiles: all have 16 rows of 64 bytes (Intel SDM, LDTILECFG)."""
SHAPES[0] = 1
SHAPES[16:32].view(np.uint16)[:] = 64
SHAPES[48:56] = TILE_ROWS

_NOTHING = ir.VoidType()
_NUMBER = ir.IntType(8)


def _call(builder: Any, name: str, *args: Any) -> None:
    kind = ir.FunctionType(_NOTHING, [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), args)


def _at(builder: Any, address: Any) -> Any:
    return pointer(builder, address, _NUMBER)


@intrinsic
def shape_tiles(_typing: Any, shapes: Any, before: Any) -> Any:
    """Give this thread's tiles their shapes, and write those that they had before."""

    def _shape(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _call(builder, "sttilecfg", _at(builder, args[1]))
        _call(builder, "ldtilecfg", _at(builder, args[0]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), _shape


@intrinsic
def tile_products(
    _typing: Any, x: Any, x_bytes: Any, plane_bytes: Any, size: Any, panel: Any, next_panel: Any, sums: Any
) -> Any:
    """Write the sums of products of 16 rows and a panel: int32 [4, 16, 16], the first four tiles.

    `x` is where the upper plane begins, with rows `x_bytes` apart; the lower one is behind it. `size`, of columns, is a
    multiple of 64, at most `EXACT_COLUMNS`. The next panel, if it is not 0, is brought near meanwhile.
    """

    def _multiply(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, x_bytes, plane_bytes, size, panel, next_panel, sums = args
        tiles = [_NUMBER(i) for i in range(8)]
        for i in range(4):
            _call(builder, "tilezero", tiles[i])
        with cgutils.for_range(builder, builder.udiv(size, WORD(TILE_COLUMNS))) as loop:
            column = builder.mul(loop.index, WORD(TILE_COLUMNS))
            upper, first = builder.add(x, column), builder.mul(column, WORD(PANEL))
            weight, ahead = builder.add(panel, first), builder.add(next_panel, first)
            with builder.if_then(builder.icmp_unsigned("!=", next_panel, WORD(0))):
                for line in range(0, TILE_COLUMNS * PANEL, 64):
                    bring_near(builder, builder.add(ahead, WORD(line)))
            _call(builder, "tileloadd64", tiles[4], _at(builder, upper), x_bytes)
            _call(builder, "tileloadd64", tiles[5], _at(builder, builder.add(upper, plane_bytes)), x_bytes)
            for half in range(2):
                at = builder.add(weight, WORD(half * TILE_ROWS * QUAD))
                _call(builder, "tileloadd64", tiles[6 + half], _at(builder, at), WORD(PANEL * QUAD))
            for half in range(2):
                _call(builder, "tdpbssd", tiles[half], tiles[4], tiles[6 + half])
                _call(builder, "tdpbusd", tiles[2 + half], tiles[5], tiles[6 + half])
        for i in range(4):
            at = builder.add(sums, WORD(i * TILE_BYTES))
            _call(builder, "tilestored64", tiles[i], _at(builder, at), WORD(64))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), _multiply


@intrinsic
def whole_sums(_typing: Any, upper: Any, lower: Any) -> Any:
    """Return 16 sums 256 * upper + lower of int32 at two addresses, as float32."""

    def _add(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        high, low = (builder.load(pointer(builder, at, BITS), align=4) for at in args)
        return builder.sitofp(builder.add(builder.shl(high, ir.Constant(BITS, [8] * LANES)), low), VECTOR)

    return LANES_TYPE(types.int64, types.int64), _add
