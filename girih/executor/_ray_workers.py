"""The actors of one executor and their places on the cluster's machines: made, named in errors, ended."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import girih
from girih.errors import ConfigError, ExecutorError
from girih.executor._ray_actor import actor_class
from girih.executor._ray_host import Introduction
from girih.executor._remote import name_ranks
from girih.executor._served import package_paths

logger = logging.getLogger(__name__)

PLACE_TIMEOUT_S = 20.0
"""How long others may still have the CPUs that the workers need."""

BOOT_TIMEOUT_S = 120.0
"""How long an actor's process may take to start: on a new machine it reads Python's files for the first time."""

SHARED_BYTES = 64 << 10
"""A longer message goes into Ray's object store once, not to every actor anew."""


class RayWorkers:
    """One actor for each rank, each on one CPU; ranks that are neighbours are on the same machine where possible.

    Args:
        num_workers: ranks.
    """

    def __init__(self, num_workers: int):
        self._num_workers = num_workers
        self._places: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._introductions: list[Introduction] = []

    def start(self) -> list[Future[Any]]:
        """Make the actors.

        Returns:
            A future per rank, which fails when the actor ends.

        Raises:
            ConfigError: the cluster has too few CPUs, or another version of Girih.
            ExecutorError: an actor could not be made; with its rank and the original text.
        """
        self._places = places = self._reserve()
        setup = {
            "log_level": logging.getLogger().getEffectiveLevel(),
            "package_paths": package_paths(),
            "num_threads": os.environ.get("OMP_NUM_THREADS"),
        }
        # the calls of a worker are done in order, on one thread; the one that never returns has another thread
        options = {"num_cpus": 1, "concurrency_groups": {"end": 1}, "allow_out_of_order_execution": False}
        actor: Any = ray.remote(**options)(actor_class())  # type: ignore[call-overload]
        sys_path = [str(folder) for folder in sys.path]
        self._actors = [
            actor.options(scheduling_strategy=place).remote(rank, sys_path, setup)
            for rank, place in enumerate(_in_order(places))
        ]
        self._meet()
        return [actor.until_end.options(concurrency_group="end").remote().future() for actor in self._actors]

    @property
    def rendezvous(self) -> str | None:
        """Return where the workers meet, an init_method of torch.distributed; None for a lone one."""
        if self._num_workers == 1:
            return None
        first = self._introductions[0]
        host = f"[{first.address}]" if ":" in first.address else first.address
        return f"tcp://{host}:{first.port}"

    def send(self, data: bytes) -> list[Future[bytes]]:
        """Send a message to all; returns a future of each rank's answer."""
        message = ray.put(data) if len(data) > SHARED_BYTES else data
        return [actor.call.remote(message).future() for actor in self._actors]

    def describe_end(self, rank: int, error: BaseException) -> str:
        """Say in one line which actor ended and why, from Ray's error."""
        where = ""
        if self._introductions:
            where = f" (process {self._introductions[rank].pid} on {self._introductions[rank].address})"
        return f"the worker of rank {rank}{where} has ended: {_in_short(error)}"

    def end(self, timeout_s: float) -> None:
        """End the actors and give their places back; those on this machine are waited for, others' end is Ray's task.

        Args:
            timeout_s: to wait for each; Ray itself takes some seconds for one that is stopped by a signal.
        """
        for actor in self._actors:
            with contextlib.suppress(RayError):
                ray.kill(actor)
        if self._places is not None:
            remove_placement_group(self._places)
        here = ray.util.get_node_ip_address()
        for rank, other in enumerate(self._introductions):
            if other.address == here and not _has_ended(other.pid, timeout_s):
                logger.error("Ray does not end the worker of rank %d: process %d", rank, other.pid)

    def _reserve(self) -> PlacementGroup:
        """Wait for the CPUs."""
        need, have = self._num_workers, int(ray.cluster_resources().get("CPU", 0))
        advice = (
            "give Ray more (ray start --num-cpus), add a machine (ray start --address), or choose a smaller "
            "--tensor-parallel-size or --pipeline-parallel-size"
        )
        if have < need:
            raise ConfigError(f"{need} workers need {need} CPUs, one each; the Ray cluster has {have}: {advice}")
        places = placement_group([{"CPU": 1}] * need, strategy="PACK")
        if not places.wait(PLACE_TIMEOUT_S):
            remove_placement_group(places)
            free = int(ray.available_resources().get("CPU", 0))
            raise ExecutorError(
                f"{need} workers need {need} CPUs, one each; of the Ray cluster's {have} only {free} became free "
                f"within {PLACE_TIMEOUT_S:g} s: end what uses them, {advice}"
            )
        return places

    def _meet(self) -> None:
        """Wait for the processes of all actors."""
        calls = [actor.introduce.remote() for actor in self._actors]
        _, silent = ray.wait(calls, num_returns=len(calls), timeout=BOOT_TIMEOUT_S)
        if silent:
            who = name_ranks([calls.index(call) for call in silent])
            raise ExecutorError(f"{who}: Ray has started no process within {BOOT_TIMEOUT_S:g} s")
        introductions = []
        for rank, call in enumerate(calls):
            try:
                introductions.append(ray.get(call))
            except (RayError, GetTimeoutError) as error:
                raise ExecutorError(self.describe_end(rank, error)) from error
        for rank, other in enumerate(introductions):
            if other.version != girih.__version__:
                raise ConfigError(
                    f"the worker of rank {rank} on {other.address} has girih {other.version}, the engine has "
                    f"{girih.__version__}: install the same version on every machine"
                )
        self._introductions = introductions


def _in_order(group: PlacementGroup) -> list[PlacementGroupSchedulingStrategy]:
    """Return the places for the ranks in their order, those on one machine together, on this one first."""
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    here = ray.get_runtime_context().get_node_id()
    order = sorted(nodes, key=lambda bundle: (nodes[bundle] != here, nodes[bundle], bundle))
    return [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle) for bundle in order]


def _has_ended(pid: int, timeout_s: float) -> bool:
    """Wait for the end of a process of this machine, not always a child; tells whether it has come."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))
    finally:
        os.close(descriptor)


def _in_short(error: BaseException) -> str:
    """Return Ray's text without the fields of its identifiers and its page of advice."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith("\t")]
    text, _, advice = " ".join(lines).partition(" Some common causes include")
    return f"{text} The system kills a process like this when memory runs out." if advice else text
