"""Which file holds which weight: the headers of a directory's safetensors files, checked; no tensor is read.

    file = header length (8 bytes, little-endian) | header (JSON) | data
    header = {name: {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end]}, ...}

The data must be exactly what the header says, without gap or overlap: a file that is a byte short would be mapped
and read as zeros or rubbish.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from girih.checkpoint.hf_config import read_json_object
from girih.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# the limit of the safetensors library; a longer header is damage
MAX_HEADER_BYTES = 100_000_000

# safetensors name -> (name in torch, bytes of one element)
DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "BF16": ("bfloat16", 2),
    "F16": ("float16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}

_PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")

# in many a checkpoint, and rightly not in the model: a table that is computed, and the copy of a tied embedding
_HARMLESS_ENDINGS = (".rotary_emb.inv_freq", "lm_head.weight")


@dataclass(frozen=True)
class TensorInfo:
    """Where one weight is and what it looks like.

    Args:
        file: the safetensors file that holds it.
        dtype: torch's name, e.g. "bfloat16".
        shape: elements per dimension.
        num_bytes: size of its data.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


class WeightIndex(Mapping[str, TensorInfo]):
    """The weights of a directory by name.

    Args:
        directory: where they are, for messages.
        tensors: name -> place.
    """

    def __init__(self, directory: Path, tensors: Mapping[str, TensorInfo]):
        self.directory = directory
        self._tensors = dict(tensors)

    def __getitem__(self, name: str) -> TensorInfo:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all weights as stored."""
        return sum(info.num_bytes for info in self._tensors.values())


def open_weights(directory: Path) -> WeightIndex:
    """Read and check the safetensors headers of a Hugging Face directory.

    Args:
        directory: with model.safetensors, or with model.safetensors.index.json and the files it lists; other
            safetensors files are ignored.

    Raises:
        CheckpointError: no weights, pickled weights, a file that is missing, cut short or something else.
    """
    if (directory / SINGLE_FILE).exists():
        return WeightIndex(directory, read_header(directory / SINGLE_FILE))
    if not (directory / INDEX_FILE).exists():
        raise CheckpointError(_explain_no_weights(directory))
    file_of = _read_index(directory / INDEX_FILE)
    headers = {file: read_header(directory / file) for file in sorted(set(file_of.values()))}
    tensors = {}
    for name, file in file_of.items():
        if name not in headers[file]:
            raise CheckpointError(f"{directory / INDEX_FILE} says that {name!r} is in {file}, but it is not")
        tensors[name] = headers[file][name]
    return WeightIndex(directory, tensors)


def has_weights(directory: Path) -> bool:
    """Tell whether `open_weights` would find anything to check."""
    return any((directory / name).exists() for name in (SINGLE_FILE, INDEX_FILE))


def is_pickled(path: Path) -> bool:
    """Tell from its name whether a file holds pickled Python objects."""
    return path.name.endswith(_PICKLED_SUFFIXES)


def check_weights(index: WeightIndex, expected: Mapping[str, Sequence[int]]) -> None:
    """Check that a checkpoint holds exactly the weights a model needs.

    Args:
        index: what there is.
        expected: name -> shape the model's config calls for.

    Raises:
        CheckpointError: weights are missing, have another shape, or would be left over; in one line, with names.
    """
    missing = [name for name in expected if name not in index]
    wrong = [
        f"{name} is {list(index[name].shape)}, config.json calls for {list(shape)}"
        for name, shape in expected.items()
        if name in index and index[name].shape != tuple(shape)
    ]
    unexpected = [name for name in index if name not in expected and not name.endswith(_HARMLESS_ENDINGS)]
    problems = [
        f"{what}: {some_of(items)}"
        for what, items in (("missing", missing), ("wrong shape", wrong), ("not in the model", unexpected))
        if items
    ]
    if problems:
        raise CheckpointError(f"{index.directory}: the weights do not match config.json; {'; '.join(problems)}")


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read the header of one safetensors file and check it against the file's size.

    Raises:
        CheckpointError: the file is missing, is something else, or is not as long as its header says.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            header_bytes = _header_length(path, file.read(8), size)
            raw = file.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is not a safetensors file: its header is not a JSON object")
    header.pop("__metadata__", None)
    places = sorted((*_read_entry(path, name, entry), name) for name, entry in header.items())
    end = 0
    for begin, stop, _, name in places:
        if begin != end:
            kind = "overlaps the tensor before it" if begin < end else "leaves a gap before it"
            raise CheckpointError(f"{path}: tensor {name!r} at byte {begin} {kind}, which ends at {end}; it is damaged")
        end = stop
    expected = 8 + header_bytes + end
    if expected != size:
        what = "truncated" if size < expected else "followed by something else"
        raise CheckpointError(f"{path} is {what}: its header calls for {expected} bytes, the file has {size}")
    return {name: info for _, _, info, name in places}


def _header_length(path: Path, start: bytes, size: int) -> int:
    """Check the first eight bytes and return the header's length; explain what the file is if it is something else."""
    if size == 0:
        raise CheckpointError(f"{path} is empty")
    if _is_lfs_pointer(path, size):
        raise CheckpointError(f"{path} is a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
    length = int.from_bytes(start, "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        claim = f"a header of {length} bytes is claimed, " if size >= 8 else ""
        raise CheckpointError(f"{path} is not a safetensors file, or is truncated: {claim}the file has {size} bytes")
    return length


def _is_lfs_pointer(path: Path, size: int) -> bool:
    with open(path, "rb") as file:
        return size < 1024 and file.read(24) == b"version https://git-lfs."


def _read_entry(path: Path, name: str, entry: Any) -> tuple[int, int, TensorInfo]:
    """Check one header entry; sizes are exact integers.

    Returns:
        (begin, end, info), offsets from the start of the data.
    """
    try:
        kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(f"{path}: the header's entry for {name!r} is malformed: {entry!r:.80}") from None
    if kind not in DTYPES:
        raise CheckpointError(f"{path}: tensor {name!r} has dtype {kind!r}; known: {', '.join(DTYPES)}")
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise CheckpointError(f"{path}: tensor {name!r} has a shape or offsets that are not whole numbers from 0 on")
    dtype, itemsize = DTYPES[kind]
    num_bytes = math.prod(shape) * itemsize
    if end - begin != num_bytes:
        raise CheckpointError(
            f"{path}: tensor {name!r} of shape {shape} ({kind}) needs {num_bytes} bytes, its offsets span {end - begin}"
        )
    return begin, end, TensorInfo(path, dtype, tuple(shape), num_bytes)


def _read_index(path: Path) -> dict[str, str]:
    """Return tensor name -> file name of model.safetensors.index.json; every file must be there."""
    file_of = read_json_object(path).get("weight_map")
    if not isinstance(file_of, dict) or not file_of or not all(isinstance(file, str) for file in file_of.values()):
        raise CheckpointError(f'{path} has no "weight_map" of tensor names to file names')
    for file in sorted(set(file_of.values())):
        if Path(file).name != file or file in ("", ".", ".."):
            raise CheckpointError(f"{path} lists {file!r}; only files beside the index are read")
        if not (path.parent / file).is_file():
            raise CheckpointError(f"{path} lists {file}, which is not there; the download is incomplete")
    return file_of


def _explain_no_weights(directory: Path) -> str:
    files = sorted(directory.iterdir()) if directory.is_dir() else []
    if pickled := [file.name for file in files if is_pickled(file)]:
        return (
            f"{directory} has only pickled weights ({some_of(pickled)}), which can run code when they are opened; "
            "convert them to safetensors first"
        )
    if others := [file.name for file in files if file.suffix == ".safetensors"]:
        return (
            f"{directory} has {some_of(others)}, but neither {SINGLE_FILE} nor {INDEX_FILE} to list the model's files"
        )
    return f"{directory} has no {SINGLE_FILE} and no {INDEX_FILE}; only its config can be used"


def some_of(items: Sequence[str], limit: int = 4) -> str:
    """Name the first few for a message, and how many more there are."""
    return ", ".join(items[:limit]) + (f" and {len(items) - limit} more" if len(items) > limit else "")
