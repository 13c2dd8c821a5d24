"""What compiled attention is written in: kernels that several threads run, and arithmetic on 16 numbers at once.

    Kernel      a compiled function with a C address; gets one record of numbers, among them addresses
    array_at    memory as an array
    Lanes       16 float32 numbers in registers: load, store, splat, multiply_add, keep, exp2, dots, ...

Loops over plain arrays would be vectorised by guess; here each function says which numbers go together, and in which
order they are summed up, so that the same numbers always have the same sum. LLVM maps 16 lanes to whatever registers
the processor has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from fcntl import LOCK_EX, flock
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import from_dtype, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model
from numba.np.arrayobj import populate_array

from girih.kv.compiled import inner, kept_on_disk

__all__ = [
    "LANES", "Kernel", "add", "array_at", "dots1", "dots2", "dots3", "dots4", "exp2", "fetch_add", "inner", "keep",
    "larger", "largest", "load", "multiply", "multiply_add", "prefetch", "splat", "store", "subtract", "total",
    "weigh1", "weigh2", "weigh3", "weigh4", "weigh1_16", "weigh2_16", "weigh3_16", "weigh4_16",
]  # fmt: skip

_intrinsic: Any = intrinsic  # its type hides that compiled functions leave out the first argument

LANES = 16
_EXP2_TERMS = 7  # of the power series; within -0.5 .. 0.5 they are exact to float32

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_VECTOR, _BITS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)


class Kernel:
    """A compiled function without a result, by its C address.

    Args:
        function: takes one record of numbers; makes no array.
        arguments: the record's fields.
    """

    def __init__(self, function: Callable[..., Any], arguments: np.dtype[Any]):
        folder = Path(__file__).parent
        self._compiled = kept_on_disk(function, folder, no_cpython_wrapper=True, _nrt=False, error_model="numpy")
        self._types = (from_dtype(arguments),)

    @cached_property
    def address(self) -> int:
        """Return the address of `void function(arguments *)`; compiled, or loaded, when first asked for."""
        with self._one_process():
            self._compiled.compile(self._types)
        made = self._compiled.overloads[self._types]
        return made.library.get_pointer_to_function(made.fndesc.llvm_cfunc_wrapper_name)

    @contextmanager
    def _one_process(self) -> Iterator[None]:
        """Let other processes wait, which then find what this one has compiled; without files, each does it itself."""
        with ExitStack() as stack:
            with suppress(OSError, AttributeError):  # no place to write, or, where numba keeps nothing, no such names
                cache = self._compiled._cache
                cache._impl.locator.ensure_cache_path()
                lock = cache._cache_file._index_path.removesuffix("nbi") + "lock"
                flock(stack.enter_context(open(lock, "ab")), LOCK_EX)
            yield


class _LanesType(types.Type):
    """16 float32 numbers, as numba knows them."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


_LANES = _LanesType()


@register_model(_LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: types.Type):
        super().__init__(manager, kind, _VECTOR)


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _constant(number: float) -> ir.Constant:
    return ir.Constant(_VECTOR, [number] * LANES)


def _spread(builder: Any, number: Any) -> Any:
    vector = ir.VectorType(number.type, LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), number, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), ir.Constant(_BITS, [0] * LANES))


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32"), (a, b, c))


def _halve(builder: Any, vector: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Combine the upper with the lower half until one number is left."""
    for size in (8, 4, 2, 1):
        order = ir.Constant(_BITS, [(i + size) % LANES for i in range(LANES)])
        vector = combine(builder, vector, builder.shuffle_vector(vector, vector, order))
    return builder.extract_element(vector, ir.Constant(_INT, 0))


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@_intrinsic
def array_at(_typing: Any, address: Any, size: Any, element: Any) -> Any:
    """Return the array [size] of such elements, e.g. `np.float32` or the dtype of a record, that lies at an address."""
    kind = types.Array(element.dtype, 1, "C")

    def _make(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        made = context.make_array(kind)(context, builder)
        data_type = context.get_data_type(kind.dtype)
        itemsize = context.get_constant(types.intp, context.get_abi_sizeof(data_type))
        pointer = _pointer(builder, args[0], data_type)
        populate_array(made, pointer, (args[1],), (itemsize,), itemsize, None)
        return made._getvalue()

    return kind(types.int64, types.int64, element), _make


@_intrinsic
def fetch_add(_typing: Any, address: Any, number: Any) -> Any:
    """Add to the int64 at an address and return what it was; threads see each other's sums, and all written before."""

    def _advance(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args[0], ir.IntType(64)), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), _advance


def _element_type(kind: Any) -> Any:
    return _FLOAT if kind == types.float32 else ir.IntType(kind.bitwidth)


def _widen(builder: Any, numbers: Any, kind: Any) -> Any:
    if kind == types.float32:
        return numbers
    if kind == types.int8:
        return builder.sitofp(numbers, _VECTOR)
    shifted = builder.shl(builder.zext(numbers, _BITS), ir.Constant(_BITS, [16] * LANES))
    return builder.bitcast(shifted, _VECTOR)


@_intrinsic
def prefetch(_typing: Any, address: Any) -> Any:
    """Have the 64 bytes around an address brought near; any address will do."""

    def _bring(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = _pointer(builder, args[0], ir.IntType(8))
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _INT, _INT, _INT])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, (pointer, _INT(0), _INT(2), _INT(1)))  # to read; to the second cache; data
        return context.get_dummy_value()

    return types.void(types.int64), _bring


@_intrinsic
def load(_typing: Any, address: Any) -> Any:
    """Return 16 float32 at an address."""
    return _LANES(types.int64), lambda _context, builder, _signature, args: _read(builder, args[0], types.float32)


@_intrinsic
def store(_typing: Any, address: Any, lanes: Any) -> Any:
    """Write 16 numbers to an address, as float32."""

    def _write(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.store(args[1], _pointer(builder, args[0], _VECTOR), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, _LANES), _write


@_intrinsic
def splat(_typing: Any, number: Any) -> Any:
    """Return one number 16 times."""
    return _LANES(types.float32), lambda _context, builder, _signature, args: _spread(builder, args[0])


@_intrinsic
def add(_typing: Any, a: Any, b: Any) -> Any:
    """Return a + b."""
    return _LANES(_LANES, _LANES), lambda _context, builder, _signature, args: builder.fadd(*args)


@_intrinsic
def multiply(_typing: Any, a: Any, b: Any) -> Any:
    """Return a * b."""
    return _LANES(_LANES, _LANES), lambda _context, builder, _signature, args: builder.fmul(*args)


@_intrinsic
def subtract(_typing: Any, a: Any, b: Any) -> Any:
    """Return a - b."""
    return _LANES(_LANES, _LANES), lambda _context, builder, _signature, args: builder.fsub(*args)


@_intrinsic
def multiply_add(_typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once."""
    return _LANES(_LANES, _LANES, _LANES), lambda _context, builder, _signature, args: _fma(builder, *args)


@_intrinsic
def larger(_typing: Any, a: Any, b: Any) -> Any:
    """Return the larger of each two; b where either is NaN."""
    return _LANES(_LANES, _LANES), lambda _context, builder, _signature, args: _larger(builder, *args)


@_intrinsic
def largest(_typing: Any, lanes: Any) -> Any:
    """Return the largest of the 16."""
    return types.float32(_LANES), lambda _context, builder, _signature, args: _halve(builder, args[0], _larger)


@_intrinsic
def total(_typing: Any, lanes: Any) -> Any:
    """Return the sum of the 16."""

    def _sum(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return _halve(builder, args[0], lambda builder, a, b: builder.fadd(a, b))

    return types.float32(_LANES), _sum


@_intrinsic
def keep(_typing: Any, lanes: Any, first: Any, stop: Any, other: Any) -> Any:
    """Return numbers first .. stop of the 16, and `other` in place of the rest; any int64 will do."""

    def _select(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        numbers, first, stop, other = args
        place = ir.Constant(ir.VectorType(ir.IntType(64), LANES), list(range(LANES)))
        inside = builder.and_(
            builder.icmp_signed(">=", place, _spread(builder, first)),
            builder.icmp_signed("<", place, _spread(builder, stop)),
        )
        return builder.select(inside, numbers, _spread(builder, other))

    return _LANES(_LANES, types.int64, types.int64, types.float32), _select


@_intrinsic
def exp2(_typing: Any, lanes: Any) -> Any:
    """Return 2 ** x for each x <= 0; NaN stays NaN, and what is smaller than 2 ** -126 becomes that."""

    def _power(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        smallest, magic = _constant(-126.0), _constant(float(3 << 22))
        x = builder.select(builder.fcmp_ordered("<", args[0], smallest), smallest, args[0])
        shifted = builder.fadd(x, magic)  # the whole part of x is in the lowest bits now
        rest = builder.fsub(x, builder.fsub(shifted, magic))
        bias = ir.Constant(_BITS, [127 - 0x4B400000] * LANES)
        exponent = builder.add(builder.bitcast(shifted, _BITS), bias)
        whole = builder.bitcast(builder.shl(exponent, ir.Constant(_BITS, [23] * LANES)), _VECTOR)
        terms = [float(np.float32(math.log(2) ** k / math.factorial(k))) for k in range(_EXP2_TERMS + 1)]
        part = _constant(terms.pop())
        while terms:
            part = _fma(builder, part, rest, _constant(terms.pop()))
        return builder.fmul(whole, part)

    return _LANES(_LANES), _power


def _dots(num: int) -> Any:
    """Return the function `dots` for so many queries, 1 to 4; 16 sums are made at once, of 4 to 16 keys."""
    num_keys = {1: 16, 2: 8}.get(num, 4)

    @_intrinsic
    def dots(_typing: Any, queries: Any, size: Any, keys: Any, kind: Any, scores: Any, row_bytes: Any) -> Any:
        """Write dot products of queries [num, size] and the next keys, which lie at these addresses, to scores."""

        def _multiply(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            queries, size, keys, _, scores, row_bytes = args
            element, word = kind.instance_type, ir.IntType(64)
            table = builder.load(_pointer(builder, keys, ir.ArrayType(word, num_keys)), align=8)
            rows = [builder.extract_value(table, j) for j in range(num_keys)]
            sums = [cgutils.alloca_once_value(builder, _constant(0.0)) for _ in range(num * num_keys)]
            with cgutils.for_range(builder, builder.lshr(size, word(4))) as loop:
                column = builder.shl(loop.index, word(4))
                q = [
                    _read(
                        builder,
                        _place(builder, queries, builder.add(column, builder.mul(size, word(i))), 4),
                        types.float32,
                    )
                    for i in range(num)
                ]
                for j, row in enumerate(rows):
                    k = _read(builder, _place(builder, row, column, element.bitwidth // 8), element)
                    for i in range(num):
                        one = sums[i * num_keys + j]
                        builder.store(_fma(builder, q[i], k, builder.load(one)), one)
            vectors = [builder.load(one) for one in sums] + [_constant(0.0)] * (LANES - num * num_keys)
            sixteen = _sum_each(builder, vectors)
            for i in range(num):
                order = ir.Constant(ir.VectorType(_INT, num_keys), list(range(i * num_keys, (i + 1) * num_keys)))
                result = builder.shuffle_vector(sixteen, _constant(0.0), order)
                to = builder.add(scores, builder.mul(row_bytes, word(i)))
                builder.store(result, _pointer(builder, to, result.type), align=4)
            return _context.get_dummy_value()

        return types.void(*[types.int64] * 3, kind, *[types.int64] * 2), _multiply

    return dots


def _weigh(num: int, width: int) -> Any:
    """Return the function `weigh` for so many queries, 1 to 4, and so many vectors of the values."""

    @_intrinsic
    def weigh(
        _typing: Any, weights: Any, row_bytes: Any, values: Any, num_values: Any, column: Any, kind: Any,
        factors: Any, sums: Any, sum_bytes: Any,
    ) -> Any:  # fmt: skip
        """Let sums of each query be sums * factors + weights of values from a column on, which lie at addresses."""

        def _multiply(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            weights, row_bytes, values, num_values, column, _, factors, sums, sum_bytes = args
            element, word, made = kind.instance_type, ir.IntType(64), {}
            for i in range(num):
                factor = _read(builder, _place(builder, factors, word(i * LANES), 4), types.float32)
                for d in range(width):
                    at = builder.add(builder.mul(sum_bytes, word(i)), word(d * LANES * 4))
                    at = builder.add(builder.add(sums, at), builder.shl(column, word(2)))
                    old = builder.fmul(_read(builder, at, types.float32), factor)
                    made[i, d] = at, cgutils.alloca_once_value(builder, old)
            with cgutils.for_range(builder, num_values) as loop:
                row = builder.load(_pointer(builder, _place(builder, values, loop.index, 8), word))
                v = [
                    _read(
                        builder,
                        _place(builder, row, builder.add(column, word(d * LANES)), element.bitwidth // 8),
                        element,
                    )
                    for d in range(width)
                ]
                for i in range(num):
                    at = _place(builder, builder.add(weights, builder.mul(row_bytes, word(i))), loop.index, 4)
                    w = _spread(builder, builder.load(_pointer(builder, at, _FLOAT)))
                    for d in range(width):
                        one = made[i, d][1]
                        builder.store(_fma(builder, w, v[d], builder.load(one)), one)
            for at, one in made.values():
                builder.store(builder.load(one), _pointer(builder, at, _VECTOR), align=4)
            return _context.get_dummy_value()

        return types.void(*[types.int64] * 5, kind, *[types.int64] * 3), _multiply

    return weigh


def _place(builder: Any, address: Any, index: Any, itemsize: int) -> Any:
    return builder.add(address, builder.mul(index, index.type(itemsize)))


def _read(builder: Any, address: Any, kind: Any) -> Any:
    pointer = _pointer(builder, address, ir.VectorType(_element_type(kind), LANES))
    return _widen(builder, builder.load(pointer, align=kind.bitwidth // 8), kind)


def _sum_each(builder: Any, vectors: list[Any]) -> Any:
    """Return the sums of 16 vectors, added up in pairs, neighbour by neighbour."""
    even, odd = (ir.Constant(_BITS, list(range(start, 2 * LANES, 2))) for start in (0, 1))
    while len(vectors) > 1:
        vectors = [
            builder.fadd(builder.shuffle_vector(a, b, even), builder.shuffle_vector(a, b, odd))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]


dots1, dots2, dots3, dots4 = map(_dots, (1, 2, 3, 4))
weigh1, weigh2, weigh3, weigh4 = (_weigh(num, 4) for num in (1, 2, 3, 4))
weigh1_16, weigh2_16, weigh3_16, weigh4_16 = (_weigh(num, 1) for num in (1, 2, 3, 4))
