"""How the cache's run time is compiled: the only file that names numba.

    entry   what Python calls
    inner   what only compiled functions call

State is many arrays, handed on as the address of a `Record`. To count the references of arrays costs more than most
functions do, so `inner` functions count none: they must not make an array nor return one. Integer division by zero is
not caught in them.

A compiled function is kept on disk, beside its source or in the user's cache directory ($NUMBA_CACHE_DIR says another),
so that only the first start after an installation spends seconds on it. It has the functions it calls compiled in, also
those of other files, so it is compiled anew when any of these files changes; numba itself looks at one file only.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import njit, typeof, types
from numba.core import cgutils
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    NativeValue,
    infer_getattr,
    lower_getattr_generic,
    models,
    register_model,
    typeof_impl,
    unbox,
)
from numpy import array, int64, ndarray

logger = logging.getLogger(__name__)

_njit: Any = njit  # numba's stubs lack most of its options

inner: Callable[..., Any] = _njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False, error_model="numpy")
"""Decorates what only compiled functions call, and that makes no array."""


def entry(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate what Python calls; where nothing can be kept on disk it is compiled at every start.

    Args:
        function: takes numbers, arrays and records.
    """
    try:
        compiled = _njit(cache=True)(function)
        kept = compiled._cache._cache_file  # numba has no public name for what its cache compares with
        kept._source_stamp = (kept._source_stamp, _digest(Path(__file__).parent))
    except RuntimeError as error:  # numba: no directory to cache in
        logger.warning("compiling %s at every start: %s; set NUMBA_CACHE_DIR", function.__name__, error)
        compiled = _njit(function)
    variants: dict[tuple[object, ...], Callable[..., Any]] = {}

    @wraps(function)
    def _call(*args: Any) -> Any:
        # numba takes longer to find the variant for the types than most calls take
        key = tuple(map(_kind, args))
        variant = variants.get(key)
        if variant is None:
            types = tuple(map(typeof, args))
            compiled.compile(types)
            variant = variants[key] = compiled.get_overload(types)
        return variant(*args)

    _call.compiled = compiled  # type: ignore[attr-defined]
    return _call


def _kind(arg: object) -> object:
    if type(arg) is ndarray:
        return arg.dtype.num, arg.ndim, arg.flags.num
    return arg.type if type(arg) is Record else type(arg)


@cache
def _digest(folder: Path) -> str:
    # of the sources with compiled functions in them
    sources = (path.read_bytes() for path in sorted(folder.rglob("*.py")))
    return hashlib.sha256(b"\0".join(source for source in sources if b"girih.kv.compiled" in source)).hexdigest()


class Record:
    """Many arrays that Python hands to compiled functions as one address.

    A tuple of arrays would be taken apart and handed on array by array in every call, and compiled that way. Compiled
    functions read a field with `record.name`; the arrays must not be replaced, and their references are not counted:
    whoever made the record keeps it while they run.

    Args:
        arrays: a named tuple of arrays in C order, or of further such tuples.
    """

    def __init__(self, arrays: Any):
        self._parts: list[object] = [arrays]
        fields: list[tuple[str, types.Type]] = []
        words: list[int] = []
        for name, value in arrays._asdict().items():
            if isinstance(value, ndarray):
                fields.append((name, types.Array(typeof(value).dtype, value.ndim, "C")))
                # as numba lays out an array: no owner, no parent, sizes, address, shape, strides
                words += [0, 0, value.size, value.itemsize, value.ctypes.data, *value.shape, *value.strides]
            else:
                part = Record(value)
                self._parts.append(part)
                fields.append((name, part.type))
                words.append(part.address)
        block = array(words, dtype=int64)
        self._parts.append(block)
        self.address: int = block.ctypes.data
        self.type: RecordType = RecordType(type(arrays).__name__, tuple(fields))


class RecordType(types.Type):
    """What numba knows of a `Record`: its fields, by name and type, in order."""

    def __init__(self, name: str, fields: tuple[tuple[str, types.Type], ...]):
        self.fields = fields
        super().__init__(name=f"Record({name}: {fields})")


register_model(RecordType)(models.OpaqueModel)


@typeof_impl.register(Record)
def _type_of_record(record: Record, _context: object) -> RecordType:
    return record.type


@infer_getattr
class _RecordAttribute(AttributeTemplate):
    key = RecordType

    def generic_resolve(self, record: RecordType, name: str) -> types.Type | None:  # type: ignore[override]
        """Return the type of a field, None if there is none of that name."""
        return dict(record.fields).get(name)


@lower_getattr_generic(RecordType)
def _read_field(context: Any, builder: Any, record: RecordType, address: Any, name: str) -> Any:
    names = [field for field, _ in record.fields]
    layout = ir.LiteralStructType([context.get_value_type(kind) for _, kind in record.fields])
    pointer = builder.bitcast(address, layout.as_pointer())
    return builder.load(cgutils.gep_inbounds(builder, pointer, 0, names.index(name)))


@unbox(RecordType)
def _take_address(kind: RecordType, record: Any, context: Any) -> NativeValue:
    number = context.pyapi.object_getattr_string(record, "address")
    address = context.pyapi.long_as_longlong(number)
    context.pyapi.decref(number)
    return NativeValue(context.builder.inttoptr(address, context.context.get_value_type(kind)))
