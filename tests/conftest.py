"""Fixtures shared by all tests: the two real models, fetched once, and one thread for the tiny ones."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as girih/device/cpu.py says; torch is loaded after this
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
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


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """Connect to a Ray cluster of two nodes with 2 CPUs each; its tests are in the xdist group "ray", to share it."""
    import ray
    from ray.cluster_utils import Cluster

    Path(tempfile.gettempdir(), "ray").mkdir(exist_ok=True)  # Ray writes an address there, wherever else the cluster is
    folder = tempfile.mkdtemp(prefix="ray-")  # short, as the names of sockets are in it
    node = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "temp_dir": folder})
    try:
        cluster.add_node(**node)
        ray.init(address=cluster.address, logging_level="error")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
