"""Arithmetic on 16 numbers at once, for compiled kernels.

    array_at    memory as an array
    Lanes       16 float32 numbers in registers: load, store, splat, multiply_add, keep, exp2, ...

The last names of `__all__` build LLVM code, for products that need a loop of their own.

Loops over plain arrays would be vectorised by guess; here each function says which numbers go together, and in which
order they are summed up, so that the same numbers always have the same sum. LLVM maps 16 lanes to whatever registers
the processor has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as numba_intrinsic
from numba.extending import models, register_model
from numba.np.arrayobj import populate_array

from girih.kv.compiled import inner

__all__ = [
    "LANES", "add", "array_at", "bytes_of", "divide", "exp2", "fetch_add", "inner", "keep", "larger", "largest",
    "load", "load_as", "load_some", "multiply", "multiply_add", "prefetch", "rounded", "splat", "store", "store_as",
    "store_some", "subtract", "total",
    "BITS", "FLOAT", "INT", "LANES_TYPE", "VECTOR", "bring_near", "constant", "fma", "intrinsic", "place", "pointer",
    "read", "spread", "sum_each",
]  # fmt: skip

intrinsic: Any = numba_intrinsic  # its type hides that compiled functions leave out the first argument

LANES = 16
_EXP2_TERMS = 7  # of the power series; within -0.5 .. 0.5 they are exact to float32

FLOAT, INT = ir.FloatType(), ir.IntType(32)
VECTOR, BITS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES)


class _LanesType(types.Type):
    """16 float32 numbers, as numba knows them."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


LANES_TYPE = _LanesType()


@register_model(_LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: types.Type):
        super().__init__(manager, kind, VECTOR)


def pointer(builder: Any, address: Any, kind: Any) -> Any:
    """Return an address as a pointer to such a value."""
    return builder.inttoptr(address, kind.as_pointer())


def constant(number: float) -> ir.Constant:
    """Return one number 16 times."""
    return ir.Constant(VECTOR, [number] * LANES)


def spread(builder: Any, number: Any) -> Any:
    """Return one number of any type 16 times."""
    vector = ir.VectorType(number.type, LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), number, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), ir.Constant(BITS, [0] * LANES))


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32"), (a, b, c))


def _halve(builder: Any, vector: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Combine the upper with the lower half until one number is left."""
    for size in (8, 4, 2, 1):
        order = ir.Constant(BITS, [(i + size) % LANES for i in range(LANES)])
        vector = combine(builder, vector, builder.shuffle_vector(vector, vector, order))
    return builder.extract_element(vector, ir.Constant(INT, 0))


def _first(builder: Any, count: Any) -> Any:
    """Return 16 bits, those of the first `count` lanes set."""
    places = ir.Constant(ir.VectorType(ir.IntType(64), LANES), list(range(LANES)))
    return builder.icmp_signed("<", places, spread(builder, count))


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@intrinsic
def array_at(_typing: Any, address: Any, size: Any, element: Any) -> Any:
    """Return the array [size] of such elements, e.g. `np.float32` or the dtype of a record, that lies at an address."""
    kind = types.Array(element.dtype, 1, "C")

    def _make(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        made = context.make_array(kind)(context, builder)
        data_type = context.get_data_type(kind.dtype)
        itemsize = context.get_constant(types.intp, context.get_abi_sizeof(data_type))
        data = pointer(builder, args[0], data_type)
        populate_array(made, data, (args[1],), (itemsize,), itemsize, None)
        return made._getvalue()

    return kind(types.int64, types.int64, element), _make


@intrinsic
def fetch_add(_typing: Any, address: Any, number: Any) -> Any:
    """Add to the int64 at an address and return what it was; threads see each other's sums, and all written before."""

    def _advance(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", pointer(builder, args[0], ir.IntType(64)), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), _advance


def _element_type(kind: Any) -> Any:
    return FLOAT if kind == types.float32 else ir.IntType(kind.bitwidth)


def _widen(builder: Any, numbers: Any, kind: Any) -> Any:
    if kind == types.float32:
        return numbers
    if kind == types.int8:
        return builder.sitofp(numbers, VECTOR)
    shifted = builder.shl(builder.zext(numbers, BITS), ir.Constant(BITS, [16] * LANES))
    return builder.bitcast(shifted, VECTOR)


def _narrow(builder: Any, lanes: Any, kind: Any) -> Any:
    """Round to the nearest number of a type, of two as near to the even one; NaN stays NaN."""
    if kind == types.float32:
        return lanes
    assert kind == types.uint16, kind
    bits = builder.bitcast(lanes, BITS)
    upper = builder.lshr(bits, ir.Constant(BITS, [16] * LANES))
    odd = builder.and_(upper, ir.Constant(BITS, [1] * LANES))
    bits = builder.add(bits, builder.add(odd, ir.Constant(BITS, [0x7FFF] * LANES)))
    upper = builder.lshr(bits, ir.Constant(BITS, [16] * LANES))
    is_nan = builder.fcmp_unordered("uno", lanes, lanes)
    return builder.trunc(
        builder.select(is_nan, ir.Constant(BITS, [0x7FC0] * LANES), upper), ir.VectorType(ir.IntType(16), LANES)
    )


def _suffix(kind: Any) -> str:
    """Return what LLVM calls 16 numbers of a type."""
    return f"v{LANES}{'f' if kind == types.float32 else 'i'}{kind.bitwidth}"


@intrinsic
def prefetch(_typing: Any, address: Any) -> Any:
    """Have the 64 bytes around an address brought near; any address will do."""

    def _bring(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        bring_near(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), _bring


@intrinsic
def load(_typing: Any, address: Any) -> Any:
    """Return 16 float32 at an address."""
    return LANES_TYPE(types.int64), lambda _context, builder, _signature, args: read(builder, args[0], types.float32)


@intrinsic
def store(_typing: Any, address: Any, lanes: Any) -> Any:
    """Write 16 numbers to an address, as float32."""

    def _write(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.store(args[1], pointer(builder, args[0], VECTOR), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, LANES_TYPE), _write


@intrinsic
def bytes_of(_typing: Any, kind: Any) -> Any:
    """Return the bytes of a number of a type, `np.float32` or `np.uint16` (bfloat16)."""
    size = kind.instance_type.bitwidth // 8
    return types.int64(kind), lambda _context, _builder, _signature, _args: ir.Constant(ir.IntType(64), size)


@intrinsic
def load_as(_typing: Any, address: Any, kind: Any) -> Any:
    """Return 16 numbers of a type at an address."""
    return LANES_TYPE(types.int64, kind), lambda _context, builder, _signature, args: read(
        builder, args[0], kind.instance_type
    )


@intrinsic
def store_as(_typing: Any, address: Any, lanes: Any, kind: Any) -> Any:
    """Write 16 numbers to an address, rounded to a type."""
    element = kind.instance_type

    def _write(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        numbers = _narrow(builder, args[1], element)
        builder.store(numbers, pointer(builder, args[0], numbers.type), align=element.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(types.int64, LANES_TYPE, kind), _write


@intrinsic
def load_some(_typing: Any, address: Any, count: Any, kind: Any) -> Any:
    """Return the first `count` of 16 numbers of a type at an address, zeros for the others, which are not read."""
    element = kind.instance_type

    def _read_some(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        vector = ir.VectorType(_element_type(element), LANES)
        at, mask = pointer(builder, args[0], vector), _first(builder, args[1])
        function_type = ir.FunctionType(vector, [at.type, INT, mask.type, vector])
        name = f"llvm.masked.load.{_suffix(element)}.p0"
        function = cgutils.get_or_insert_function(builder.module, function_type, name)
        numbers = builder.call(function, (at, INT(element.bitwidth // 8), mask, ir.Constant(vector, None)))
        return _widen(builder, numbers, element)

    return LANES_TYPE(types.int64, types.int64, kind), _read_some


@intrinsic
def store_some(_typing: Any, address: Any, lanes: Any, count: Any, kind: Any) -> Any:
    """Write the first `count` of 16 numbers to an address, rounded to a type; nothing behind them changes."""
    element = kind.instance_type

    def _write_some(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        numbers = _narrow(builder, args[1], element)
        at, mask = pointer(builder, args[0], numbers.type), _first(builder, args[2])
        function_type = ir.FunctionType(ir.VoidType(), [numbers.type, at.type, INT, mask.type])
        name = f"llvm.masked.store.{_suffix(element)}.p0"
        function = cgutils.get_or_insert_function(builder.module, function_type, name)
        builder.call(function, (numbers, at, INT(element.bitwidth // 8), mask))
        return context.get_dummy_value()

    return types.void(types.int64, LANES_TYPE, types.int64, kind), _write_some


@intrinsic
def rounded(_typing: Any, lanes: Any, kind: Any) -> Any:
    """Return 16 numbers as they would be read after `store_as`."""
    element = kind.instance_type

    def _round(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return _widen(builder, _narrow(builder, args[0], element), element)

    return LANES_TYPE(LANES_TYPE, kind), _round


@intrinsic
def splat(_typing: Any, number: Any) -> Any:
    """Return one number 16 times."""
    return LANES_TYPE(types.float32), lambda _context, builder, _signature, args: spread(builder, args[0])


@intrinsic
def add(_typing: Any, a: Any, b: Any) -> Any:
    """Return a + b."""
    return LANES_TYPE(LANES_TYPE, LANES_TYPE), lambda _context, builder, _signature, args: builder.fadd(*args)


@intrinsic
def multiply(_typing: Any, a: Any, b: Any) -> Any:
    """Return a * b."""
    return LANES_TYPE(LANES_TYPE, LANES_TYPE), lambda _context, builder, _signature, args: builder.fmul(*args)


@intrinsic
def subtract(_typing: Any, a: Any, b: Any) -> Any:
    """Return a - b."""
    return LANES_TYPE(LANES_TYPE, LANES_TYPE), lambda _context, builder, _signature, args: builder.fsub(*args)


@intrinsic
def divide(_typing: Any, a: Any, b: Any) -> Any:
    """Return a / b."""
    return LANES_TYPE(LANES_TYPE, LANES_TYPE), lambda _context, builder, _signature, args: builder.fdiv(*args)


@intrinsic
def multiply_add(_typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once."""
    three = [LANES_TYPE] * 3
    return LANES_TYPE(*three), lambda _context, builder, _signature, args: fma(builder, *args)


@intrinsic
def larger(_typing: Any, a: Any, b: Any) -> Any:
    """Return the larger of each two; b where either is NaN."""
    return LANES_TYPE(LANES_TYPE, LANES_TYPE), lambda _context, builder, _signature, args: _larger(builder, *args)


@intrinsic
def largest(_typing: Any, lanes: Any) -> Any:
    """Return the largest of the 16."""
    return types.float32(LANES_TYPE), lambda _context, builder, _signature, args: _halve(builder, args[0], _larger)


@intrinsic
def total(_typing: Any, lanes: Any) -> Any:
    """Return the sum of the 16."""

    def _sum(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return _halve(builder, args[0], lambda builder, a, b: builder.fadd(a, b))

    return types.float32(LANES_TYPE), _sum


@intrinsic
def keep(_typing: Any, lanes: Any, first: Any, stop: Any, other: Any) -> Any:
    """Return numbers first .. stop of the 16, and `other` in place of the rest; any int64 will do."""

    def _select(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        numbers, first, stop, other = args
        places = ir.Constant(ir.VectorType(ir.IntType(64), LANES), list(range(LANES)))
        inside = builder.and_(
            builder.icmp_signed(">=", places, spread(builder, first)),
            builder.icmp_signed("<", places, spread(builder, stop)),
        )
        return builder.select(inside, numbers, spread(builder, other))

    return LANES_TYPE(LANES_TYPE, types.int64, types.int64, types.float32), _select


@intrinsic
def exp2(_typing: Any, lanes: Any) -> Any:
    """Return 2 ** x for each x <= 127; NaN stays NaN, and what is smaller than 2 ** -126 becomes that."""

    def _power(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        smallest, magic = constant(-126.0), constant(float(3 << 22))
        x = builder.select(builder.fcmp_ordered("<", args[0], smallest), smallest, args[0])
        shifted = builder.fadd(x, magic)  # the whole part of x is in the lowest bits now
        rest = builder.fsub(x, builder.fsub(shifted, magic))
        bias = ir.Constant(BITS, [127 - 0x4B400000] * LANES)
        exponent = builder.add(builder.bitcast(shifted, BITS), bias)
        whole = builder.bitcast(builder.shl(exponent, ir.Constant(BITS, [23] * LANES)), VECTOR)
        terms = [float(np.float32(math.log(2) ** k / math.factorial(k))) for k in range(_EXP2_TERMS + 1)]
        part = constant(terms.pop())
        while terms:
            part = fma(builder, part, rest, constant(terms.pop()))
        return builder.fmul(whole, part)

    return LANES_TYPE(LANES_TYPE), _power


def bring_near(builder: Any, address: Any) -> None:
    """Have the 64 bytes around an address brought into the second cache; any address will do."""
    at = pointer(builder, address, ir.IntType(8))
    kind = ir.FunctionType(ir.VoidType(), [at.type, INT, INT, INT])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, (at, INT(0), INT(2), INT(1)))  # to read; to the second cache; data


def place(builder: Any, address: Any, index: Any, itemsize: int) -> Any:
    """Return the address of the item with an index."""
    return builder.add(address, builder.mul(index, index.type(itemsize)))


def read(builder: Any, address: Any, kind: Any) -> Any:
    """Return 16 numbers of a type (uint16: bfloat16) at an address, as float32."""
    at = pointer(builder, address, ir.VectorType(_element_type(kind), LANES))
    return _widen(builder, builder.load(at, align=kind.bitwidth // 8), kind)


def sum_each(builder: Any, vectors: list[Any]) -> Any:
    """Return the sums of 16 vectors, added up in pairs, neighbour by neighbour."""
    for distance in (1, 2, 4, 8):
        # lanes with this bit are b's: each stays where it is, and is added to its neighbour of the same vector
        own = [i + LANES if i & distance else i for i in range(LANES)]
        stay, move = (ir.Constant(BITS, order) for order in (own, [i ^ distance for i in own]))
        vectors = [
            builder.fadd(builder.shuffle_vector(a, b, stay), builder.shuffle_vector(a, b, move))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]
