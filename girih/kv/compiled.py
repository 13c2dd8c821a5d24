"""How the cache's run time is compiled: this file, `kernels/` and `attention/_cpu_products.py` alone name numba.

    entry   what Python calls
    inner   what only compiled functions call

State is many arrays, handed on as the address of a `Record`. To count the references of arrays costs more than most
functions do, so `inner` functions count none: they must not make an array nor return one. Integer division by zero is
not caught in them.

A compiled function is kept on disk, beside its source or in the user's cache directory ($NUMBA_CACHE_DIR says another),
so that only the first start after an installation spends seconds on it. It has the functions it calls compiled in, also
those of other files, so it is compiled anew when any of these files changes; numba itself looks at one file only. What
is kept is of use to nobody but the next start: nothing that happens to it, or to the disk, is an error.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable
from functools import cache, update_wrapper
from glob import escape
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import njit, typeof, types
from numba.core import cgutils
from numba.core.caching import IndexDataCacheFile
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
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

COMPILED = re.compile(rb"girih\.(kv\.compiled|kernels)\b")
"""What every source with compiled functions names."""

_njit: Any = njit  # numba's stubs lack most of its options


class _PartLibrary(JITCodeLibrary):
    """Code that is only linked into other code: numba would optimise each part by itself, and make it executable."""

    def finalize(self) -> None:
        """Link what it calls, and leave the rest to whoever links this."""
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0, as for a function that cannot be called from outside."""
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> _PartLibrary:
        """Return what numba gives the function's environment to, by the next method."""
        return self

    def set_env(self, name: str, env: object) -> None:
        """Do without: it is for calls of Python."""


class _PartCompiler(Compiler):
    def define_pipelines(self) -> Any:
        """Return numba's own passes, with the other library."""
        self.state.library = _PartLibrary(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        self.state.library.enable_object_caching()
        return super().define_pipelines()


inner: Callable[..., Any] = _njit(
    no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False, error_model="numpy", pipeline_class=_PartCompiler
)
"""Decorates what only compiled functions call, and that makes no array."""


class _KeptFiles(IndexDataCacheFile):
    """The files of one compiled function: an index, and the code for each types of arguments, as numba writes them.

    numba names the code of all versions alike, and writes the index first: where it could not write the code, as the
    process was killed or the disk was full, the next start would run that of an older version. So the version is in
    the names here.

    Args:
        kept: numba's, for the function's source.
        version: of all that is compiled into the function.
    """

    def __init__(self, kept: IndexDataCacheFile, version: str):
        self._any_version = kept._index_name.removesuffix(".nbi")
        super().__init__(kept._cache_path, f"{self._any_version}.{version[:16]}", (kept._source_stamp, version))

    def save(self, key: object, data: object) -> None:
        """Keep code, in place of that of other versions; where that fails it is compiled again at the next start."""
        try:
            super().save(key, data)
            mine = self._index_name.removesuffix("nbi")
            for path in Path(self._cache_path).glob(f"{escape(self._any_version)}.*"):
                if not path.name.startswith(mine):
                    path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s cannot be kept for the next start: %s; set NUMBA_CACHE_DIR", self._any_version, error)

    def load(self, key: object) -> Any:
        """Return the code for some types; None if it is not there or damaged, and it will be compiled."""
        found = None
        try:
            found = super().load(key)
        except Exception as error:  # of pickle: any, if the file is cut or overwritten
            logger.warning("%s is compiled again, as what was kept is damaged: %s", self._any_version, error)
        if found is None:
            _say_that_it_takes_long()
        return found

    def _load_index(self) -> dict[object, str]:
        try:
            return super()._load_index()
        except Exception:  # as above
            return {}


@cache
def _say_that_it_takes_long() -> None:
    """Tell once, whatever the number of functions."""
    logger.warning("compiling kernels, which takes up to a minute; the next start finds them on disk")


def kept_on_disk(function: Callable[..., Any], *folders: Path, **options: Any) -> Any:
    """Return numba's dispatcher of a function; what it compiles is kept, if there is a place for it.

    Args:
        function: to be compiled when its argument types are known.
        folders: with the sources of all that is compiled into it.
        options: of numba.
    """
    try:
        compiled = _njit(cache=True, **options)(function)
        kept = compiled._cache  # numba has no public name for where it keeps what it compiled
        kept._cache_file = _KeptFiles(kept._cache_file, _digest(frozenset(folders)))
    except RuntimeError as error:  # numba: no directory to cache in
        logger.warning("compiling %s at every start: %s; set NUMBA_CACHE_DIR", function.__name__, error)
        compiled = _njit(**options)(function)
    return compiled


class Entry:
    """A compiled function, as Python calls it; where nothing can be kept on disk it is compiled at every start.

    Args:
        function: takes numbers, arrays and records.
    """

    def __init__(self, function: Callable[..., Any]):
        update_wrapper(self, function)
        self.compiled = kept_on_disk(function, Path(__file__).parent)
        self._variants: dict[tuple[object, ...], Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        """Call it with arguments of any types."""
        # numba takes longer to find the variant for the types than most calls take
        return self.bound(*args)(*args)

    def bound(self, *examples: Any) -> Callable[..., Any]:
        """Return the function for arguments of just these types, compiled now; it does not look at types again.

        A call of it takes a fifth of the time. An array of another type or order would be read as if it were one of
        the right type.
        """
        key = tuple(map(_kind, examples))
        variant = self._variants.get(key)
        if variant is None:
            types = tuple(map(typeof, examples))
            self.compiled.compile(types)
            variant = self._variants[key] = self.compiled.get_overload(types)
        return variant


entry = Entry
"""Decorates what Python calls."""


def _kind(arg: object) -> object:
    if type(arg) is ndarray:
        return arg.dtype.num, arg.ndim, arg.flags.num
    return arg.type if type(arg) is Record else type(arg)


@cache
def _digest(folders: frozenset[Path]) -> str:
    # of the sources with compiled functions in them
    paths = sorted(path for folder in folders for path in folder.rglob("*.py"))
    sources = (path.read_bytes() for path in paths)
    return hashlib.sha256(b"\0".join(source for source in sources if COMPILED.search(source))).hexdigest()


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
