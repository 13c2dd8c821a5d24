"""Processes of the `multiproc` executor that outlive an engine, as importing torch is what takes time in starting them.

with WarmProcesses(4, tmp_path) as processes:
    executor = processes.executor(config)                 # over real workers, made anew in the first few processes
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch

from girih.config import EngineConfig
from girih.executor._base import Executor
from girih.executor.multiproc import MultiProcExecutor
from girih.layers.sources import checkpoint_views
from girih.worker import worker as worker_module


class WarmWorker:
    """In its process, the worker of one engine after another; with no rank in the engine, every answer is None."""

    def __init__(self, process: int, rendezvous: str | None):
        self.worker: Any = None

    def remake(self, config: EngineConfig, rank: int | None, rendezvous: str) -> None:
        self.release()
        self.outputs: list[Any] = []
        if rank is not None:
            self.worker = worker_module.Worker(config, rank, rendezvous)

    def call(self, method: str, *args: Any) -> Any:
        return None if self.worker is None else getattr(self.worker, method)(*args)

    def execute_model(self, step: Any) -> Any:
        self.outputs.append(self.call("execute_model", step))
        return self.outputs[-1]

    def release(self) -> None:
        self.call("shutdown")
        self.worker = None

    def shutdown(self) -> None:
        self.release()

    # ---- what tests ask

    def seen_outputs(self) -> list[tuple[list[int], list[int]]]:
        """Return the rows and tokens of every step."""
        outputs = [] if self.worker is None else self.outputs
        return [(output.rows.tolist(), output.token_ids.tolist()) for output in outputs]

    def weights(self) -> tuple[dict[str, Any], int] | None:
        """Return what it has of each of the checkpoint's tensors, and the bytes that the worker counts for them."""
        if self.worker is None:
            return None
        views = checkpoint_views(self.worker.runner.model)
        return {name: view.detach().numpy() for name, view in views.items()}, self.worker.weights_bytes

    def load_model_within(self, timeout_s: float) -> None:
        """Load a model whose worker waits so long for others, now and later."""
        connect = worker_module.connect
        worker_module.connect = lambda *args, **options: connect(*args, **(options | {"timeout_s": timeout_s}))
        try:
            self.call("load_model")
        finally:
            worker_module.connect = connect

    def add_up_alone(self, rank: int) -> None:
        """Let one rank begin a sum over all."""
        if self.worker is not None and self.worker.rank == rank:
            self.worker.ranks.all_reduce(torch.ones(3))


class WarmProcesses:
    """Processes that wait to be workers.

    Args:
        num_processes: as many as the largest engine has workers.
        directory: where the workers of an engine meet.
    """

    def __init__(self, num_processes: int, directory: Path):
        self.num_processes, self.directory = num_processes, directory
        self.multiproc = MultiProcExecutor(WarmWorker, num_workers=num_processes, output_rank=0)
        self._numbers = itertools.count()

    def __enter__(self) -> WarmProcesses:
        self.multiproc.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.multiproc.shutdown()

    def executor(self, config: EngineConfig, heard_rank: int | None = None) -> WarmExecutor:
        """Return an executor; `heard_rank` is whose output ends a step, by default the rank that samples."""
        if heard_rank is None:
            heard_rank = config.world_size - config.tensor_parallel_size
        others = [rank for rank in range(config.world_size) if rank != heard_rank]
        spare = [None] * (self.num_processes - config.world_size)
        meeting_place = f"file://{self.directory}/meet-{next(self._numbers)}"
        return WarmExecutor(self.multiproc, config, [heard_rank, *others, *spare], meeting_place)


class WarmExecutor(Executor):
    """The executor of one engine, over `multiproc`, of which the first process is heard.

    Args:
        multiproc: over `WarmWorker`s.
        config: of the engine.
        ranks: in the engine, by process; None for one that takes no part.
        rendezvous: where the workers meet.
    """

    def __init__(self, multiproc: MultiProcExecutor, config: EngineConfig, ranks: list[int | None], rendezvous: str):
        self.multiproc, self.config, self.ranks, self.rendezvous = multiproc, config, ranks, rendezvous
        self.steps: list[Any] = []
        self.is_started = False

    def ask(self, method, args_of=lambda rank: (), timeout_s=None):
        """Call a method of each `WarmWorker`; returns the answers by rank in the engine."""
        answers = self.multiproc.collective_rpc(
            method, args_by_rank=list(map(args_of, self.ranks)), timeout_s=timeout_s
        )
        by_rank = dict(zip(self.ranks, answers, strict=True))
        return [by_rank[rank] for rank in range(self.config.world_size)]

    def start(self) -> None:
        self.is_started = True
        self.ask("remake", lambda rank: (self.config, rank, self.rendezvous))

    def collective_rpc(self, method, args=(), timeout_s=None, *, args_by_rank=None):
        if args_by_rank is None:
            args_by_rank = [args] * self.config.world_size
        return self.ask("call", lambda rank: (method, *(() if rank is None else args_by_rank[rank])), timeout_s)

    def execute_model(self, step):
        self.steps.append(step)
        return self.multiproc.execute_model(step)

    def check_health(self) -> None:
        self.multiproc.check_health()

    def shutdown(self) -> None:
        if self.is_started:
            self.ask("release")
