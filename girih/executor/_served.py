"""The worker of one process and the calls to it, whatever carries them: a message in, a message out."""

from __future__ import annotations

import faulthandler
import importlib
import io
import logging
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from girih import plugins
from girih.config import EngineConfig
from girih.executor._base import worker_error
from girih.executor._frames import Buffer, Message, SentError, pack

START, STEP, SHUTDOWN = "start", "execute_model", "shutdown"


@dataclass(frozen=True)
class MakeWorker:
    """Makes an engine's worker, in the process that it is sent to.

    Args:
        config: the engine's options.
    """

    config: EngineConfig

    def __call__(self, rank: int, rendezvous: str | None) -> Any:
        """Make the worker of a rank; `rendezvous` says where it finds the others, None if there are none."""
        # before torch, whose threads are told only once how to wait for each other
        plugins.load("girih.device", self.config.device, what="device")
        return importlib.import_module("girih.worker.worker").Worker(self.config, rank, rendezvous)


class Served:
    """The worker and the calls to it.

    One of several workers that fails in a step does none of those behind it: others may still wait in the middle of the
    failed step, and would take what it sends for that step's.

    Args:
        rank: of the worker.
    """

    def __init__(self, rank: int):
        self.rank = rank
        self.worker: Any = None
        self._is_one_of_several = False
        self._failed_step: BaseException | None = None

    def answer(self, message: Message) -> tuple[list[Buffer], bool]:
        """Do one call.

        Args:
            message: (method, arguments, None or the arguments of each rank, ranks whose answers are wanted).

        Returns:
            What to send back, nothing if it is not wanted, and whether it was the last call.
        """
        method = "a call that could not be read"
        try:
            method, args, args_by_rank, ranks = message.value()
            value = self._call(method, args if args_by_rank is None else args_by_rank[self.rank])
            parts = pack(message.tag, value) if self.rank in ranks else []
        except BaseException as error:  # whatever it is belongs to the caller
            parts = pack(message.tag, self._sent(method, error))
        return parts, method == SHUTDOWN

    def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        """Make the worker, or call a method of it; `SHUTDOWN` needs no worker."""
        if method == START:
            make_worker, rendezvous = args
            self._is_one_of_several = rendezvous is not None
            self.worker = make_worker(self.rank, rendezvous)
            return None
        if method == SHUTDOWN and self.worker is None:
            return None
        if method != STEP:
            return getattr(self.worker, method)(*args)
        if self._failed_step is not None:
            raise self._failed_step
        try:
            return self.worker.execute_model(*args)
        except BaseException as error:
            if self._is_one_of_several:
                self._failed_step = error
            raise

    def _sent(self, method: str, error: BaseException) -> SentError:
        told = worker_error(self.rank, method, error)
        told.add_note(f"on the worker of rank {self.rank}:\n{''.join(traceback.format_exception(error))}")
        return SentError(told)


def package_paths() -> dict[str, list[str]]:
    """Return the packages of Girih that were given folders of plug-ins, which workers must find too."""
    packages = {name: module for name, module in sys.modules.items() if name.startswith("girih.")}
    paths = {name: list(getattr(module, "__path__", ())) for name, module in packages.items()}
    return {name: folders for name, folders in paths.items() if len(folders) > 1}


def speak_as(rank: int, log_level: int) -> None:
    """Have this process say whose its log lines are, where it was when it crashed, and what is printed line by line.

    Args:
        rank: of the worker here.
        log_level: of the engine's root logger.
    """
    faulthandler.enable()
    text = f"worker of rank {rank}: %(levelname)s: %(name)s: %(message)s"
    logging.basicConfig(level=log_level, format=text, force=True)
    if isinstance(sys.stdout, io.TextIOWrapper):  # with PYTHONUNBUFFERED the words of several workers would mix
        sys.stdout.reconfigure(line_buffering=True, write_through=False)


def add_package_paths(paths: Mapping[str, Sequence[str]]) -> None:
    """Let packages of this process find plug-ins in folders that another one named, as far as they are here."""
    for package, folders in paths.items():
        path = importlib.import_module(package).__path__  # extended in place: its spec shares the list
        path.extend(folder for folder in folders if folder not in path and os.path.isdir(folder))
