"""`multiproc` with one worker that waits."""

from functools import partial

from waiting_worker import WaitingWorker

from girih.config import EngineConfig
from girih.executor._base import Executor
from girih.executor.multiproc import MultiProcExecutor


def create(config: EngineConfig) -> Executor:
    """Make the executor of an engine."""
    return MultiProcExecutor(partial(WaitingWorker, config), num_workers=1, output_rank=0)
