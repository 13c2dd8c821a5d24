"""Fixtures shared by all tests: the two real models, fetched once, and one thread for the tiny ones."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as girih/device/cpu.py says; torch is loaded after this
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the oracle reads local directories only
os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads only wait for each other on models this small


@pytest.fixture(scope="session")
def real_model() -> Callable[[str], Path]:
    """Give the directory of a named model ("smollm2", "gemma3-270m"), pulling it on first use."""
    from girih.checkpoint.pull import pull

    return pull


@pytest.fixture(autouse=True)
def all_cores_for_real_models(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the real models compute on every core."""
    if request.node.get_closest_marker("real_weights") is None:
        yield
        return
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(1)
