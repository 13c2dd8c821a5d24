"""GGUF header -> metadata and tensors, in one pass over the mapped file; no tensor byte is touched.

    "GGUF" version num_tensors num_metadata | key type value ... | name dims type offset ... | pad | tensor data

Every count, length and dimension is an exact Python integer that is checked against the bytes there are
before anything is allocated for it. A split file (00001-of-0000N) is read as the whole it is part of.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from girih.errors import CheckpointError
from girih.units import round_up

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT_BYTES = 32
MAX_DIMENSIONS = 4

# GGUF value type -> struct format of a scalar; 8 is a string, 9 an array
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _FLOAT32 = 8, 9, 6
_U64 = struct.Struct("<Q")

# magic, version, two counts
_START_BYTES = 4 + 4 + 8 + 8

# the fewest bytes one entry of each kind can take
_MIN_METADATA_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8

_SPLIT_NAME = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclass(frozen=True)
class GgufTensor:
    """One tensor as it lies in the file.

    Args:
        name: GGUF name, e.g. "blk.0.attn_q.weight".
        shape: rows first, as numpy and torch count (the file lists the fastest dimension first).
        type_name: "F32", "Q4_K", ...
        data: uint8 [rows, row_bytes], a view of the mapped file; one row is `shape[-1]` elements.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    data: np.ndarray


@dataclass(frozen=True)
class GgufFile:
    """A GGUF model: metadata by key, tensors by name.

    Args:
        path: the file, or the first part of a split one.
        metadata: scalars, strings, lists of strings, and numpy arrays.
        tensors: of all parts.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @cached_property
    def architecture(self) -> str:
        """Return `general.architecture`, e.g. "llama"."""
        return self.text("general.architecture")

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer of the metadata; without `default` it must be there."""
        return self._typed(key, default, int, "a whole number")

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number of the metadata; without `default` it must be there."""
        return float(self._typed(key, default, (int, float), "a number"))

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return a true/false value of the metadata; without `default` it must be there."""
        return self._typed(key, default, bool, "true or false")

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string of the metadata; without `default` it must be there."""
        return self._typed(key, default, str, "a string")

    def strings(self, key: str) -> list[str]:
        """Return a list of strings of the metadata, which must be there."""
        return self._typed(key, None, list, "a list of strings")

    def numbers(self, key: str) -> np.ndarray:
        """Return an array of numbers of the metadata, which must be there."""
        return self._typed(key, None, np.ndarray, "an array of numbers")

    def _typed(self, key: str, default: Any, kind: type | tuple[type, ...], what: str) -> Any:
        value = self.metadata.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.path}: the GGUF metadata has no {key!r}")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise CheckpointError(f"{self.path}: GGUF metadata {key!r} must be {what}, not {str(value)[:60]!r}")
        return value


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file and, of a split one, of all its parts.

    Args:
        path: the file; of a split model any of its parts.

    Raises:
        CheckpointError: not GGUF, big-endian, another version, truncated, or with sizes the file cannot
            hold; or a part of a split model is missing.
    """
    paths = split_parts(path)
    parts = [_read_part(part) for part in paths]
    count = parts[0].integer("split.count", 1)
    if count > 1 and count != len(parts):
        raise CheckpointError(
            f"{path} is part of a model split in {count} files, but its name does not end in "
            f"-0000K-of-{count:05d}.gguf, so the other parts cannot be found; rename it as it was"
        )
    tensors: dict[str, GgufTensor] = {}
    for part in parts:
        if repeated := tensors.keys() & part.tensors.keys():
            raise CheckpointError(f"{part.path}: tensor {min(repeated)!r} is in another part of the model as well")
        tensors.update(part.tensors)
    expected = parts[0].integer("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise CheckpointError(f"{path}: the parts hold {len(tensors)} tensors, the first one promises {expected}")
    return GgufFile(paths[0], parts[0].metadata, tensors)


def split_parts(path: Path) -> list[Path]:
    """List the files of a model that is split as NAME-00001-of-0000N.gguf, in order; others are their own only part.

    Raises:
        CheckpointError: a part is not there; the message names it.
    """
    match = _SPLIT_NAME.match(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count:
        raise CheckpointError(f"{path}: part {int(match['number'])} of {count} cannot be; rename the file as it was")
    paths = []
    for k in range(1, count + 1):
        part = path.with_name(f"{match['stem']}-{k:05d}-of-{count:05d}.gguf")
        if not part.is_file():
            raise CheckpointError(f"{path} is one of {count} parts; part {k} is missing: {part}")
        paths.append(part)
    return paths


def _read_part(path: Path) -> GgufFile:
    header = _Header(path, _map(path))
    num_tensors, num_metadata = header.check_start()
    metadata: dict[str, Any] = {}
    for _ in range(num_metadata):
        key = header.string("a metadata key")
        metadata[key] = header.value(header.unpack("I"), key)
    infos = [header.tensor_info() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise header.error(f"general.alignment is {alignment}, not a power of two")
    data_start = round_up(header.position, alignment)
    tensors: dict[str, GgufTensor] = {}
    for info in infos:
        if info.name in tensors:
            raise header.error(f"two tensors are called {info.name!r}")
        tensors[info.name] = _locate(header, info, data_start, alignment)
    return GgufFile(path, metadata, tensors)


def _map(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            if size < _START_BYTES:
                raise CheckpointError(f"{path} is {size} bytes long, too short for a GGUF file")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


@dataclass(frozen=True)
class _TensorInfo:
    """A tensor as the header lists it: fastest dimension first, offset from the start of the tensor data."""

    name: str
    dimensions: tuple[int, ...]
    type_id: int
    offset_bytes: int


def _locate(header: _Header, info: _TensorInfo, data_start: int, alignment: int) -> GgufTensor:
    """Check a tensor's size and place against the file and give the view of its bytes."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(info.type_id)
    except ValueError:
        raise header.error(f"tensor {info.name!r} has the unknown type number {info.type_id}") from None
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    row, *outer = info.dimensions
    if row % block_elements:
        raise header.error(f"tensor {info.name!r} has rows of {row} elements; {kind.name} packs {block_elements}")
    row_bytes = row // block_elements * block_bytes
    num_bytes = row_bytes * math.prod(outer)
    start = data_start + info.offset_bytes
    if info.offset_bytes % alignment or start + num_bytes > header.size:
        raise header.error(
            f"tensor {info.name!r} of shape {info.dimensions[::-1]} ({kind.name}) needs bytes {start} to "
            f"{start + num_bytes}, the file has {header.size}; it is truncated or damaged"
        )
    data = np.frombuffer(header.mapped, np.uint8, num_bytes, start).reshape(-1, row_bytes)
    return GgufTensor(info.name, info.dimensions[::-1], kind.name, data)


class _Header:
    """A position in the mapped file that never runs past its end.

    Args:
        path: for messages.
        mapped: the whole file.
    """

    def __init__(self, path: Path, mapped: mmap.mmap):
        self.path = path
        self.mapped = mapped
        self.size = len(mapped)
        self.position = 0

    def error(self, what: str) -> CheckpointError:
        """Make the error for something wrong in this file."""
        return CheckpointError(f"{self.path}: {what}")

    def check_start(self) -> tuple[int, int]:
        """Check magic, byte order, version and counts.

        Returns:
            (number of tensors, number of metadata entries).
        """
        magic = self.mapped[:4]
        if magic != MAGIC:
            raise self.error(f"not a GGUF file: it starts with {magic!r}, not {MAGIC!r}")
        self.position = 4
        version = self.unpack("I")
        if version not in SUPPORTED_VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in SUPPORTED_VERSIONS:
                raise self.error("a big-endian GGUF file; convert it with `gguf-convert-endian FILE little`")
            raise self.error(f"GGUF version {version}; versions 2 and 3 can be read")
        num_tensors, num_metadata = self.unpack("Q"), self.unpack("Q")
        least = num_tensors * _MIN_TENSOR_BYTES + num_metadata * _MIN_METADATA_BYTES
        if least > self.size - self.position:
            raise self.error(
                f"the header promises {num_tensors} tensors and {num_metadata} metadata entries, at least "
                f"{least} bytes; the file has {self.size}; it is truncated or damaged"
            )
        return num_tensors, num_metadata

    def unpack(self, code: str) -> Any:
        """Read one little-endian scalar with the given struct code."""
        self.need(struct.calcsize(code), "a number")
        (value,) = struct.unpack_from("<" + code, self.mapped, self.position)
        self.position += struct.calcsize(code)
        return value

    def need(self, num_bytes: int, what: str) -> None:
        """Raise unless `num_bytes` more bytes are there."""
        if num_bytes > self.size - self.position:
            raise self.error(
                f"{what} of {num_bytes} bytes at byte {self.position} runs past the end of the file "
                f"({self.size} bytes); it is truncated or damaged"
            )

    def string(self, what: str) -> str:
        """Read a length-prefixed UTF-8 string."""
        length = self.unpack("Q")
        self.need(length, what)
        raw = self.mapped[self.position : self.position + length]
        self.position += length
        return self._decode(raw, what)

    def value(self, kind: int, key: str) -> Any:
        """Read one metadata value: a scalar, a str, a list of str, or a numpy array."""
        if kind == _STRING:
            return self.string(f"the value of {key!r}")
        if kind == _ARRAY:
            return self._array(self.unpack("I"), self.unpack("Q"), key)
        if kind not in _SCALARS:
            raise self.error(f"metadata {key!r} has the unknown type number {kind}")
        value = self.unpack(_SCALARS[kind])
        # the shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06
        return float(str(np.float32(value))) if kind == _FLOAT32 else value

    def _array(self, kind: int, count: int, key: str) -> list[str] | np.ndarray:
        what = f"the array {key!r}"
        if kind == _STRING:
            return self._string_array(count, what)
        if kind not in _SCALARS:
            raise self.error(f"{what} holds values of type number {kind}, which no known model uses")
        dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
        num_bytes = count * dtype.itemsize
        self.need(num_bytes, what)
        values = np.frombuffer(self.mapped, dtype, count, self.position)
        self.position += num_bytes
        return values

    def _string_array(self, count: int, what: str) -> list[str]:
        self.need(count * 8, what)
        # A vocabulary has 262,144 of these: local names, and one slice per string.
        mapped, position, limit, unpack = self.mapped, self.position, self.size - 8, _U64.unpack_from
        raw = []
        for _ in range(count):
            if position > limit:
                break
            start = position + 8
            position = start + unpack(mapped, position)[0]
            raw.append(mapped[start:position])
        if len(raw) < count or position > self.size:
            raise self.error(f"{what} of {count} strings runs past the end of the file; it is truncated or damaged")
        self.position = position
        return [self._decode(item, what) for item in raw]

    def _decode(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8 text ({error.reason}); the file is damaged") from None

    def tensor_info(self) -> _TensorInfo:
        """Read one entry of the tensor list."""
        name = self.string("a tensor name")
        num_dimensions = self.unpack("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self.error(f"tensor {name!r} has {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are possible")
        dimensions = tuple(self.unpack("Q") for _ in range(num_dimensions))
        if 0 in dimensions:
            raise self.error(f"tensor {name!r} of shape {dimensions[::-1]} is empty")
        return _TensorInfo(name, dimensions, self.unpack("I"), self.unpack("Q"))
