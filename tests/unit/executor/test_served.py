"""A worker and the calls to it, as messages."""

import os
import subprocess
import sys

import pytest
from toy_worker import ToyWorker

from girih.errors import ExecutorError
from girih.executor._frames import HEADER, Message, SentError, pack
from girih.executor._served import Served


def call(served, method, *args):
    (data,) = pack(1, (method, args, None, (0,)))
    parts, _ = served.answer(Message(data[: HEADER.size], bytearray(data[HEADER.size :])))
    answer = b"".join(parts)
    value = Message(answer[: HEADER.size], bytearray(answer[HEADER.size :])).value()
    if isinstance(value, SentError):
        raise value.error()
    return value


@pytest.mark.parametrize("rendezvous", [None, "file:///somewhere"])
def test_a_worker_that_failed_in_a_step_does_no_other_if_others_may_wait_for_it_in_that_step(rendezvous):
    served = Served(0)
    call(served, "start", ToyWorker, rendezvous)
    with pytest.raises(ExecutorError, match="rank 0 failed in execute_model: ValueError: x"):
        call(served, "execute_model", {"raise": "x"})
    if rendezvous is None:
        assert call(served, "execute_model", 2) == (0, 2)
        return
    with pytest.raises(ExecutorError, match="rank 0 failed in execute_model: ValueError: x"):
        call(served, "execute_model", 2)
    assert call(served, "seen_steps") == [{"raise": "x"}]


PROGRAM = """
import os, sys

class Looker:
    def find_spec(self, name, *_):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT"))

sys.meta_path.insert(0, Looker())
from girih.config import EngineConfig
from girih.executor._served import MakeWorker

MakeWorker(EngineConfig(model="m"))(0, None)
"""


@pytest.mark.parametrize(
    ("told", "heard"),
    [({}, "passive 2000\n"), ({"GOMP_SPINCOUNT": "7"}, "passive 7\n")],
    ids=["nothing", "by the user"],
)
def test_a_workers_threads_are_told_to_spin_a_moment_then_sleep_before_torch_is_loaded(told, heard):
    """OpenMP asks once; threads that only spin took the core that the engine needs, and half the speed."""
    ours = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {name: value for name, value in os.environ.items() if name not in ours} | told
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout == heard
