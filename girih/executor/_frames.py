"""A value as bytes for a stream: arrays lie in the message as they are, everything else is pickled.

header  | tag | body bytes | pickle bytes | number of arrays |
body    | bytes of each array | pickle | pad | array | pad | array ...        each array on a multiple of 16
"""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
from typing import Any, TypeAlias

import numpy as np

from girih.errors import GirihError

Buffer: TypeAlias = bytes | bytearray | memoryview

HEADER = struct.Struct("<QQQQ")
ALIGNMENT = 16
_PADDING = bytes(ALIGNMENT)

# copying up to so much costs less than writing many parts
JOINED_BYTES = 1 << 18


def pack(tag: int, value: Any) -> list[Buffer]:
    """Return a message as parts to be written one after another; arrays are not copied.

    Args:
        tag: what the reader finds in `Message.tag`, even if it cannot read the value.
        value: anything that can be pickled.

    Raises:
        Exception: whatever pickle raises.
    """
    arrays: list[memoryview] = []
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=5, buffer_callback=lambda buffer: arrays.append(buffer.raw()))
    pickler.dispatch_table = _REDUCERS
    pickler.dump(value)
    data = file.getvalue()
    parts: list[Buffer] = [b"".join(array.nbytes.to_bytes(8, "little") for array in arrays), data]
    offset = len(parts[0]) + len(data)
    for array in arrays:
        padding = -offset % ALIGNMENT
        parts += (_PADDING[:padding], array)
        offset += padding + array.nbytes
    parts.insert(0, HEADER.pack(tag, offset, len(data), len(arrays)))
    return [b"".join(parts)] if offset <= JOINED_BYTES else parts


def _reduce_array(array: np.ndarray) -> tuple[Any, ...]:
    """Say how an array is made again: in a third of the time that numpy's own way takes, for the plain ones."""
    if array.dtype.kind not in "biuf" or not array.flags.c_contiguous:
        return array.__reduce_ex__(5)  # type: ignore[return-value]
    return np.ndarray, (array.shape, array.dtype.str, pickle.PickleBuffer(array))  # type: ignore[arg-type]


_REDUCERS = {**copyreg.dispatch_table, np.ndarray: _reduce_array}


class Message:
    """A message that has arrived.

    Args:
        header: its header.
        body: the rest; the arrays of the value are views of it.
    """

    def __init__(self, header: Buffer, body: bytearray):
        self.tag, _, self._pickle_bytes, self._num_arrays = HEADER.unpack(header)
        self._body = body

    @staticmethod
    def body_bytes(header: Buffer) -> int:
        """Return how many bytes follow a header."""
        return int(HEADER.unpack(header)[1])

    def value(self) -> Any:
        """Read the value.

        Raises:
            Exception: whatever pickle raises, e.g. where a class cannot be imported.
        """
        body = memoryview(self._body)
        table_bytes = 8 * self._num_arrays
        offset = table_bytes + self._pickle_bytes
        arrays = []
        for (num_bytes,) in struct.iter_unpack("<Q", body[:table_bytes]):
            offset += -offset % ALIGNMENT
            arrays.append(body[offset : offset + num_bytes])
            offset += num_bytes
        return pickle.loads(body[table_bytes : table_bytes + self._pickle_bytes], buffers=arrays)


class SentError:
    """An error for the user that travels: pickle would call its class with the message only, and lose the rest.

    Args:
        error: the error.
    """

    def __init__(self, error: GirihError):
        self._kind, self._args, self._fields = type(error), error.args, vars(error)

    def error(self) -> GirihError:
        """Return the error, of the same class and with the same attributes."""
        error = self._kind.__new__(self._kind, *self._args)
        vars(error).update(self._fields)
        return error
