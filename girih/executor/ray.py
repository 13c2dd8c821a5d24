"""Workers as actors of a Ray cluster, one per rank, on one machine or several. Needs `pip install 'girih[ray]'`."""

from __future__ import annotations

import importlib.util

from girih.config import EngineConfig
from girih.errors import ConfigError
from girih.executor._base import Executor


def create(config: EngineConfig) -> Executor:
    """Make the executor of an engine; `start` brings the workers up.

    Raises:
        ConfigError: Ray is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "the executor 'ray' needs Ray, which is not installed: pip install 'girih[ray]', or choose the executor "
            "multiproc for several workers on this machine"
        )
    from girih.executor._ray_executor import RayExecutor

    return RayExecutor.of(config)
