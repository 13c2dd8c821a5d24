"""Workers of several ranks, each in a process of its own, reached by pipes: the smallest executor that there can be.

with RankProcesses(4, tmp_path) as processes:             # started once, as importing torch is what takes time
    core_options = processes.executor(config)             # an `Executor` over workers made anew in the first few
"""

from __future__ import annotations

import itertools
import multiprocessing
import traceback
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from girih.config import EngineConfig
from girih.errors import ExecutorError

TIMEOUT_S = 120.0


def serve(connection: Any) -> None:
    """Make workers and call them, as told, until the pipe is closed."""
    from girih.worker.worker import Worker

    worker: Any = None
    while True:
        try:
            method, args = connection.recv()
        except EOFError:
            return
        try:
            if method == "make":
                if worker is not None:
                    worker.shutdown()
                worker = Worker(*args)
                answer = None
            elif callable(method):
                answer = method(worker, *args)
            else:
                answer = getattr(worker, method)(*args)
            connection.send((answer, None))
        except Exception as error:
            connection.send((None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


class RankProcesses:
    """Processes that wait to be ranks."""

    def __init__(self, num_processes: int, directory: Path):
        context = multiprocessing.get_context("spawn")  # a fork would have numba's and torch's threads in it
        self.directory = directory
        self.pipes, self.processes = [], []
        self._numbers = itertools.count()
        for _ in range(num_processes):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join(10)

    def call(self, method: Any, args_by_rank: list[tuple[Any, ...]]) -> list[Any]:
        """Call a method, or a function of (worker, *args), in as many processes as there are arguments."""
        self.send(method, args_by_rank)
        answers = self.answers(len(args_by_rank))
        errors = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(answers) if error is not None]
        if errors:
            raise ExecutorError("\n".join(errors))
        return [answer for answer, _ in answers]

    def send(self, method: Any, args_by_rank: list[tuple[Any, ...]]) -> None:
        for pipe, args in zip(self.pipes, args_by_rank, strict=False):
            pipe.send((method, args))

    def answers(self, num_ranks: int) -> list[tuple[Any, str | None]]:
        """Return (answer, error) of the oldest call, by rank; no wait is for ever."""
        answers = []
        for rank, pipe in enumerate(self.pipes[:num_ranks]):
            answers.append(pipe.recv() if pipe.poll(TIMEOUT_S) else (None, f"rank {rank} did not answer"))
        return answers

    def executor(self, config: EngineConfig) -> PipeExecutor:
        """Return an executor over the first few processes, with workers made anew."""
        return PipeExecutor(self, config, f"file://{self.directory}/meet-{next(self._numbers)}")


class PipeExecutor:
    """Carries calls to the ranks of one engine; a step is done when `execute_model` returns."""

    workers_are_local = True

    def __init__(self, processes: RankProcesses, config: EngineConfig, rendezvous: str):
        self.processes, self.config, self.rendezvous = processes, config, rendezvous
        self.size = config.world_size
        self.sampling_rank = (config.pipeline_parallel_size - 1) * config.tensor_parallel_size
        self.steps: list[Any] = []
        self.outputs: list[list[Any]] = []

    def start(self) -> None:
        self.processes.call("make", [(self.config, rank, self.rendezvous) for rank in range(self.size)])

    def collective_rpc(self, method, args=(), timeout_s=None, *, args_by_rank=None):
        return self.processes.call(method, args_by_rank or [args] * self.size)

    def execute_model(self, step):
        self.steps.append(step)
        self.outputs.append(self.processes.call("execute_model", [(step,)] * self.size))
        future: Future[Any] = Future()
        future.set_result(self.outputs[-1][self.sampling_rank])
        return future

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        self.processes.call("shutdown", [()] * self.size)
