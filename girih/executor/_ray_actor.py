"""The class that Ray makes actors of. It travels as code, so that a process that knows nothing of Girih can load it."""

from __future__ import annotations

from typing import Any


def actor_class() -> type:
    """Return the class; one defined in a function goes to actors as it is, not by the name of its module."""

    class GirihWorker:
        """Finds Girih where the engine has it, if that is here, and does what `RayHost` does."""

        def __init__(self, rank: int, sys_path: list[str], setup: dict[str, Any]):
            import os
            import sys

            theirs = [folder for folder in sys_path if folder and os.path.exists(folder)]
            sys.path[:] = theirs + [folder for folder in sys.path if folder not in theirs]
            from girih.executor._ray_host import RayHost

            self._host = RayHost(rank, **setup)

        def introduce(self) -> Any:
            return self._host.introduce()

        def call(self, data: bytes) -> bytes:
            return self._host.call(data)

        def until_end(self) -> None:
            self._host.until_end()

    return GirihWorker
