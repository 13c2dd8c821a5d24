"""What a user types as a model -> a Hugging Face directory on disk, or at least the facts for a plan.

Import of GGUF is loaded only where a .gguf file is named: `girih plan` must start at once.
"""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from girih.checkpoint import cache, catalog
from girih.checkpoint.hf_config import check_config, load_config, parse_json_object, read_json_object
from girih.checkpoint.progress import Progress, no_progress
from girih.checkpoint.safetensors import has_weights, is_pickled, open_weights
from girih.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model before its weights are read.

    Args:
        name: as the user typed it.
        config: the fields of config.json.
        weight_bytes: all weights as stored; None where no weights are on disk yet.
        path: the Hugging Face directory; None where there is none yet.
    """

    name: str
    config: dict[str, Any]
    weight_bytes: int | None
    path: Path | None


def resolve_model(name_or_path: str, progress: Progress = no_progress) -> Path:
    """Find the Hugging Face directory of a model.

    Args:
        name_or_path: a name of the catalog (before a directory of the same name), a Hugging Face directory, or a
            .gguf file, which is imported into the cache the first time.
        progress: called while a GGUF is imported.

    Raises:
        ConfigError: nothing of that name, or a catalog name that has not been pulled.
        CheckpointError: a file or directory that cannot be used.
    """
    if name_or_path in catalog.names():
        directory = cache.model_directory(name_or_path)
        if not cache.is_ready(directory, catalog.entry(name_or_path).gguf_sha256):
            raise ConfigError(f"{name_or_path} is not on this machine; run `girih pull {name_or_path}` once")
        return directory
    path = _existing(name_or_path)
    return path if path.is_dir() else _imported(path, progress)


def model_facts(name_or_path: str) -> ModelFacts:
    """Collect what `girih plan` needs, without importing or fetching anything.

    Args:
        name_or_path: as for `resolve_model`; a catalog name need not be pulled, a directory needs only config.json,
            and of a .gguf file the header is read. Also a config.json by its path, or its text.

    Raises:
        ConfigError: nothing of that name.
        CheckpointError: a file, directory or text that cannot be used.
    """
    if name_or_path in catalog.names():
        entry = catalog.entry(name_or_path)
        directory = cache.model_directory(name_or_path)
        if not cache.is_ready(directory, entry.gguf_sha256):
            return ModelFacts(name_or_path, entry.config, None, None)
        return ModelFacts(name_or_path, entry.config, open_weights(directory).weight_bytes, directory)
    if name_or_path.lstrip().startswith("{"):
        return _facts_of_text(name_or_path)
    path = _existing(name_or_path, or_config_file=True)
    if path.suffix == ".json" and path.is_file():
        config = check_config(read_json_object(path), str(path))
        if path.name != "config.json":
            return ModelFacts(name_or_path, config, None, None)
        path = path.parent
    if path.is_dir():
        weight_bytes = open_weights(path).weight_bytes if has_weights(path) else None
        return ModelFacts(name_or_path, load_config(path), weight_bytes, path)
    from girih.checkpoint.gguf_import import gguf_config

    return ModelFacts(name_or_path, gguf_config(path), None, None)


def _facts_of_text(text: str) -> ModelFacts:
    """Return the facts of a model whose config.json was typed in; it is called by its type."""
    where = "the text given as MODEL"
    config = check_config(parse_json_object(text, where), where)
    return ModelFacts(config["model_type"], config, None, None)


def _existing(name_or_path: str, *, or_config_file: bool = False) -> Path:
    """Return the path if it is a directory with config.json or a .gguf file; else explain what it is instead.

    Args:
        name_or_path: what the user typed.
        or_config_file: a .json file is welcome too.
    """
    try:
        path = Path(name_or_path).expanduser()
        is_directory, exists = path.is_dir(), path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, a home that does not exist, a NUL byte
        raise ConfigError(f"{name_or_path[:80]!r} cannot be a model: {error}") from error
    if is_directory:
        ggufs = sorted(path.glob("*.gguf"))
        if not (path / "config.json").is_file() and ggufs:
            raise CheckpointError(f"{path} has no config.json; to use one of its GGUF files, name it: {ggufs[0]}")
        load_config(path)  # an error of the config is an error of the model's name here
        return path
    if not exists:
        raise ConfigError(_no_such_model(name_or_path, path, or_config_file))
    if path.suffix == ".gguf" or (or_config_file and path.suffix == ".json"):
        return path
    if is_pickled(path):
        raise CheckpointError(f"{path} is pickled and can run code when it is opened; use safetensors or GGUF")
    if path.suffix in (".safetensors", ".json"):
        raise CheckpointError(f"{path} is one file of a model; name its directory: {path.parent}")
    raise CheckpointError(f"{path} is not a model; give {_what_is_one(or_config_file)}")


def _what_is_one(or_config_file: bool) -> str:
    config_file = ", or its config.json" if or_config_file else ""
    return f"a directory in Hugging Face's format, a .gguf file{config_file}"


def _no_such_model(name_or_path: str, path: Path, or_config_file: bool) -> str:
    """Say what is wrong with a name that is none, nor a path."""
    known = f"{_what_is_one(or_config_file)}, or a name that `girih pull` knows ({', '.join(catalog.names())})"
    close = difflib.get_close_matches(name_or_path, catalog.names(), n=1)
    if close:
        return f"no model {name_or_path!r}: did you mean {close[0]}? Girih takes {known}"
    if path.suffix in (".json", ".gguf", ".safetensors") or (len(path.parts) > 1 and path.parent.is_dir()):
        return f"no file or directory {name_or_path!r}; Girih takes {known}"
    fetch = ""
    if "/" in name_or_path:  # a model hub's name, or an address
        fetch = "; Girih fetches nothing from a hub: download the model and give its path"
        fetch += ", or for a plan its config.json" if or_config_file else ""
    return f"no model {name_or_path!r}; Girih takes {known}{fetch}"


def _imported(path: Path, progress: Progress) -> Path:
    """Return the cached import of a .gguf file; make it if this file, with this size and time, has none."""
    from girih.checkpoint.gguf_import import import_gguf

    target = cache.model_directory(f"{path.stem[:80]}-{_fingerprint(path)}")
    if cache.is_ready(target):
        return target
    with cache.exclusive(target):
        if not cache.is_ready(target):  # another process was faster
            with cache.staging(target) as directory:
                import_gguf(path, directory, progress)
                cache.write_marker(directory, source=str(path.resolve()))
    return target


def _fingerprint(path: Path) -> str:
    """Return 12 hex digits that change when the file, or another part of a split one, changes."""
    from girih.checkpoint.gguf_reader import split_parts

    digest = hashlib.sha256()
    for part in split_parts(path):
        status = part.stat()
        digest.update(f"{part.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:12]
