"""Fixtures shared by all tests: the two real models, fetched once, and quiet, repeatable numerics."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the oracle reads local directories only


@pytest.fixture(scope="session")
def real_model() -> Callable[[str], Path]:
    """Give the directory of a named model ("smollm2", "gemma3-270m"), pulling it on first use."""
    from girih.checkpoint.pull import pull

    return lambda name: pull(name)
