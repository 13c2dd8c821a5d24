"""Where imported models live, and how a directory appears there: whole or not at all, once, whoever is faster.

    <cache>/models/smollm2/                  a finished model: Hugging Face files and girih.json
    <cache>/models/.smollm2.lock             held while one process builds it; the others wait
    <cache>/models/.smollm2.tmp-x1y2z3/      under construction; renamed to smollm2 at the end

A reader never sees a half-written model, whatever kills the builder.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from girih.checkpoint.hf_config import read_json_object
from girih.errors import CheckpointError

MARKER_FILE = "girih.json"

# Raise it when an import would write something else than before: older directories are then built again.
IMPORT_FORMAT = 1


def cache_directory() -> Path:
    """Return the root of the cache: $GIRIH_HOME, else $XDG_CACHE_HOME/girih, else ~/.cache/girih."""
    for variable, folder in (("GIRIH_HOME", ""), ("XDG_CACHE_HOME", "girih")):
        if value := os.environ.get(variable):
            try:
                return Path(value).expanduser() / folder
            except RuntimeError as error:  # a home directory that does not exist
                raise CheckpointError(f"{variable}={value!r} is no directory: {error}") from error
    return Path.home() / ".cache" / "girih"


def model_directory(name: str) -> Path:
    """Return where the model called `name` is kept, whether it is there or not."""
    return cache_directory() / "models" / name


def is_ready(directory: Path, source_sha256: str | None = None) -> bool:
    """Tell whether `directory` was finished by this version of the import, from the source that is meant, and is whole.

    Args:
        directory: a directory below `<cache>/models`.
        source_sha256: SHA-256 of the GGUF it must come from; None takes any.
    """
    try:
        marker = read_json_object(directory / MARKER_FILE)
    except CheckpointError:
        return False
    return (
        marker.get("import_format") == IMPORT_FORMAT
        and source_sha256 in (None, marker.get("source_sha256"))
        and marker.get("file_bytes") == _file_bytes(directory)
    )


def write_marker(directory: Path, **facts: Any) -> None:
    """Write girih.json, last of all: the import's format number, where the model came from, and its files' sizes."""
    marker = {"import_format": IMPORT_FORMAT, **facts, "file_bytes": _file_bytes(directory)}
    (directory / MARKER_FILE).write_text(json.dumps(marker, indent=2) + "\n", "utf-8")


def _file_bytes(directory: Path) -> dict[str, int]:
    files = (path for path in directory.iterdir() if path.name != MARKER_FILE and path.is_file())
    return {path.name: path.stat().st_size for path in sorted(files)}


@contextmanager
def exclusive(target: Path) -> Iterator[None]:
    """Hold the lock of one model directory; the lock of a process that died is free at once.

    Raises:
        CheckpointError: the cache directory cannot be written.
    """
    with ExitStack() as stack:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(target.parent / f".{target.name}.lock", "ab"))
            _lock_file(lock.fileno())
        except OSError as error:
            raise CheckpointError(f"cannot lock {target}: {error}; set GIRIH_HOME to another place") from error
        yield


def _lock_file(descriptor: int) -> None:
    try:
        import fcntl
    except ImportError:  # Windows: two builders both work, and the rename in `staging` lets the first one win
        return
    fcntl.flock(descriptor, fcntl.LOCK_EX)


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """Give an empty directory that becomes `target` when the block ends well and vanishes when it does not.

    Call it with `exclusive(target)` held: leftovers of a killed builder are then nobody's, and are removed.

    Raises:
        CheckpointError: an error of the file system (no space, no permission), with the cache's place.
    """
    for leftover in target.parent.glob(f".{target.name}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        directory = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp-", dir=target.parent))
        try:
            built = directory / "new"
            built.mkdir()
            yield built
            if target.exists():
                os.replace(target, directory / "old")
            os.replace(built, target)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error}; free space there, or set GIRIH_HOME") from error
