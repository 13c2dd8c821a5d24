"""The two products of attention, compiled: of some queries and the keys of a tile, and of weights and its values."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from girih.kernels.lanes import (
    FLOAT,
    INT,
    LANES,
    VECTOR,
    constant,
    fma,
    intrinsic,
    place,
    pointer,
    read,
    spread,
    sum_each,
)


def _dots(num: int) -> Any:
    """Return the function `dots` for so many queries, 1 to 4; 16 sums are made at once, of 4 to 16 keys."""
    num_keys = {1: 16, 2: 8}.get(num, 4)

    @intrinsic
    def dots(
        _typing: Any, queries: Any, size: Any, keys: Any, shift: Any, kind: Any, scores: Any, row_bytes: Any
    ) -> Any:
        """Write dot products of queries [num, size] and the next keys, at these addresses plus a shift, to scores."""

        def _multiply(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            queries, size, keys, shift, _, scores, row_bytes = args
            element, word = kind.instance_type, ir.IntType(64)
            table = builder.load(pointer(builder, keys, ir.ArrayType(word, num_keys)), align=8)
            rows = [builder.add(builder.extract_value(table, j), shift) for j in range(num_keys)]
            sums = [cgutils.alloca_once_value(builder, constant(0.0)) for _ in range(num * num_keys)]
            with cgutils.for_range(builder, builder.lshr(size, word(4))) as loop:
                column = builder.shl(loop.index, word(4))
                q = [
                    read(
                        builder,
                        place(builder, queries, builder.add(column, builder.mul(size, word(i))), 4),
                        types.float32,
                    )
                    for i in range(num)
                ]
                for j, row in enumerate(rows):
                    k = read(builder, place(builder, row, column, element.bitwidth // 8), element)
                    for i in range(num):
                        one = sums[i * num_keys + j]
                        builder.store(fma(builder, q[i], k, builder.load(one)), one)
            vectors = [builder.load(one) for one in sums] + [constant(0.0)] * (LANES - num * num_keys)
            sixteen = sum_each(builder, vectors)
            for i in range(num):
                order = ir.Constant(ir.VectorType(INT, num_keys), list(range(i * num_keys, (i + 1) * num_keys)))
                result = builder.shuffle_vector(sixteen, constant(0.0), order)
                to = builder.add(scores, builder.mul(row_bytes, word(i)))
                builder.store(result, pointer(builder, to, result.type), align=4)
            return _context.get_dummy_value()

        return types.void(*[types.int64] * 4, kind, *[types.int64] * 2), _multiply

    return dots


def _weigh(num: int, width: int) -> Any:
    """Return the function `weigh` for so many queries, 1 to 4, and so many vectors of the values."""

    @intrinsic
    def weigh(
        _typing: Any, weights: Any, row_bytes: Any, values: Any, shift: Any, num_values: Any, column: Any, kind: Any,
        factors: Any, sums: Any, sum_bytes: Any,
    ) -> Any:  # fmt: skip
        """Let sums of each query be sums * factors + weights of values from a column on, at addresses plus a shift."""

        def _multiply(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            weights, row_bytes, values, shift, num_values, column, _, factors, sums, sum_bytes = args
            element, word, made = kind.instance_type, ir.IntType(64), {}
            for i in range(num):
                factor = read(builder, place(builder, factors, word(i * LANES), 4), types.float32)
                for d in range(width):
                    at = builder.add(builder.mul(sum_bytes, word(i)), word(d * LANES * 4))
                    at = builder.add(builder.add(sums, at), builder.shl(column, word(2)))
                    old = builder.fmul(read(builder, at, types.float32), factor)
                    made[i, d] = at, cgutils.alloca_once_value(builder, old)
            with cgutils.for_range(builder, num_values) as loop:
                row = builder.add(builder.load(pointer(builder, place(builder, values, loop.index, 8), word)), shift)
                v = [
                    read(
                        builder,
                        place(builder, row, builder.add(column, word(d * LANES)), element.bitwidth // 8),
                        element,
                    )
                    for d in range(width)
                ]
                for i in range(num):
                    at = place(builder, builder.add(weights, builder.mul(row_bytes, word(i))), loop.index, 4)
                    w = spread(builder, builder.load(pointer(builder, at, FLOAT)))
                    for d in range(width):
                        one = made[i, d][1]
                        builder.store(fma(builder, w, v[d], builder.load(one)), one)
            for at, one in made.values():
                builder.store(builder.load(one), pointer(builder, at, VECTOR), align=4)
            return _context.get_dummy_value()

        return types.void(*[types.int64] * 6, kind, *[types.int64] * 3), _multiply

    return weigh


dots1, dots2, dots3, dots4 = map(_dots, (1, 2, 3, 4))
weigh1, weigh2, weigh3, weigh4 = (_weigh(num, 4) for num in (1, 2, 3, 4))
weigh1_16, weigh2_16, weigh3_16, weigh4_16 = (_weigh(num, 1) for num in (1, 2, 3, 4))
