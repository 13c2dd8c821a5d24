"""`uniproc` with a worker that waits."""

from waiting_worker import WaitingWorker

from girih.config import EngineConfig
from girih.executor._base import Executor
from girih.executor.uniproc import RANK, UniProcExecutor


def create(config: EngineConfig) -> Executor:
    """Make the executor of an engine."""
    return UniProcExecutor(lambda: WaitingWorker(config, RANK))
