"""A tiny hybrid model that exists only in tests: recurrent layers between sliding and full attention.

with installed():                       girih finds arch/ and models/ of this folder as its own
    directory = save(tmp_path)          a checkpoint with random weights
    LLM(str(directory))
Dense(directory).logits(token_ids)      the same model written out over the whole sequence
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import girih.arch
import girih.models

MODEL_TYPE = "toy_recurrent"


@contextmanager
def installed() -> Iterator[None]:
    """Let Girih find the architecture, by file name as all others."""
    folders = {girih.arch: str(Path(__file__).parent / "arch"), girih.models: str(Path(__file__).parent / "models")}
    for package, folder in folders.items():
        package.__path__.append(folder)
    try:
        yield
    finally:
        for package, folder in folders.items():
            package.__path__.remove(folder)
            sys.modules.pop(f"{package.__name__}.{MODEL_TYPE}", None)
