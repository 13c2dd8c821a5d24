"""The executor of worker processes when one dies or hangs, or the parent does: told at once, and nothing is left."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from toy_worker import StubbornToyWorker, ToyWorker, is_running, named_memory

from girih.errors import ExecutorError
from girih.executor import multiproc
from girih.executor.multiproc import MultiProcExecutor


@pytest.fixture(params=[2, 4])
def executor(request):
    executor = MultiProcExecutor(ToyWorker, num_workers=request.param, output_rank=0)
    executor.start()
    yield executor
    before = time.monotonic()
    pids = [process.pid for process in executor._processes]
    executor.shutdown()
    assert not any(map(is_running, pids))
    assert time.monotonic() - before < 3


def pids(executor):
    return [process.pid for process in executor._processes]


def later(seconds, call, *args):
    threading.Timer(seconds, call, args).start()


def test_a_worker_killed_in_the_middle_of_steps_fails_them_all_within_a_second(executor):  # case 96
    futures = [executor.execute_model({"sleep": 30}) for _ in range(3)]
    time.sleep(0.1)
    start = time.monotonic()
    os.kill(pids(executor)[1], signal.SIGKILL)
    for future in futures:
        with pytest.raises(ExecutorError, match="the worker of rank 1 was killed by SIGKILL"):
            future.result(5)
    assert time.monotonic() - start < 1
    for call in (executor.check_health, lambda: executor.execute_model(1), lambda: executor.collective_rpc("where")):
        with pytest.raises(ExecutorError, match="cannot be used: the worker of rank 1 was killed by SIGKILL"):
            call()


def test_a_worker_killed_while_others_have_answered_a_call_fails_it_within_a_second(executor):
    later(0.2, os.kill, pids(executor)[0], signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(ExecutorError, match="the worker of rank 0 was killed by SIGKILL"):
        executor.collective_rpc("sleep", (30, 0))
    assert time.monotonic() - start < 1.2


def test_an_idle_worker_that_is_killed_is_noticed_without_a_call(executor):
    os.kill(pids(executor)[-1], signal.SIGKILL)
    time.sleep(0.5)
    with pytest.raises(ExecutorError, match=f"rank {len(pids(executor)) - 1} was killed"):
        executor.check_health()


@pytest.mark.parametrize(
    ("method", "args", "how"),
    [
        ("exit", (3, 1), "ended with exit code 3"),
        ("exit", (0, 1), "ended with exit code 0"),
        ("crash", (1,), "SIGSEGV"),
    ],
)
def test_a_worker_that_ends_by_itself_says_how(method, args, how):
    executor = MultiProcExecutor(ToyWorker, num_workers=2, output_rank=0)
    executor.start()
    start = time.monotonic()
    with pytest.raises(ExecutorError, match=f"the worker of rank 1 .*{how}"):
        executor.collective_rpc(method, args)
    assert time.monotonic() - start < 2
    executor.shutdown()


def test_a_stopped_worker_fails_a_call_when_its_time_is_up_and_is_named(executor):  # case 97
    os.kill(pids(executor)[1], signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(ExecutorError, match=r"rank 1: add did not return within 0\.3 s; stopped by a signal: .*rank 1"):
        executor.collective_rpc("add", (1,), timeout_s=0.3)
    assert 0.3 <= time.monotonic() - start < 1
    with pytest.raises(ExecutorError, match=r"cannot be used: .*add did not return"):
        executor.check_health()


def test_a_stopped_worker_fails_a_step_when_its_time_is_up_though_nobody_waits(executor):
    executor.step_timeout_s = 0.3
    assert executor.execute_model(1).result(5) == (0, 1)
    os.kill(pids(executor)[0], signal.SIGSTOP)
    futures = [executor.execute_model(i) for i in range(2)]
    time.sleep(0.6)
    for future in futures:
        with pytest.raises(ExecutorError, match=r"rank 0: execute_model did not return within 0\.3 s; stopped"):
            future.result(0)


def test_a_step_is_given_its_time_from_when_it_can_begin(executor):
    executor.step_timeout_s = 0.5
    futures = [executor.execute_model({"sleep": 0.3}) for _ in range(4)]
    for future in futures:
        assert future.result(5)[0] == 0


def test_who_gives_up_waiting_for_a_step_marks_the_workers_as_failed(executor):
    future = executor.execute_model({"sleep": 30})
    with pytest.raises(TimeoutError):
        future.result(0.05)
    with pytest.raises(ExecutorError, match=r"execute_model did not return within 0\.05 s"):
        executor.check_health()


@pytest.mark.parametrize(
    ("ends_by", "timeout_s", "text"),
    [("time", 1, r"total .* within 1 s; stopped by a signal: worker of rank 1$"), ("death", 30, "rank 0 was killed")],
)
def test_a_message_that_a_stopped_worker_leaves_in_the_ring_is_a_bounded_wait(executor, ends_by, timeout_s, text):
    os.kill(pids(executor)[1], signal.SIGSTOP)
    start = time.monotonic()
    if ends_by == "death":
        later(0.2, os.kill, pids(executor)[0], signal.SIGKILL)
    with pytest.raises(ExecutorError, match=text):
        executor.collective_rpc("total", (bytes(30 << 20),), timeout_s=timeout_s)
    assert time.monotonic() - start < 5


def test_an_error_behind_the_output_of_its_step_ends_everything(executor):
    future = executor.execute_model({"sleep": 0.2, "raise": "late", "rank": 1})
    assert future.result(5)[0] == 0
    time.sleep(0.5)
    with pytest.raises(ExecutorError, match="rank 1 failed in execute_model: ValueError: late"):
        executor.check_health()


def test_an_error_of_one_worker_is_blamed_on_another_one_that_dies_a_moment_later(monkeypatch):
    monkeypatch.setattr(multiproc, "BLAME_S", 5)
    executor = MultiProcExecutor(ToyWorker, num_workers=2, output_rank=0)
    executor.start()
    with pytest.raises(ExecutorError, match=r"^the worker of rank 1 ended with exit code 4$"):
        executor.collective_rpc("miss", (1,))
    executor.shutdown()


def test_a_process_that_ignores_sigterm_gets_sigkill():
    executor = MultiProcExecutor(StubbornToyWorker, num_workers=2, output_rank=0)
    executor.start()
    executor.execute_model({"sleep": 30})
    with pytest.raises(ExecutorError):
        executor.collective_rpc("add", (1,), timeout_s=0.1)
    running = pids(executor)
    executor.shutdown()
    assert not any(map(is_running, running))


def test_the_exit_code_is_known_though_another_thread_waits_for_it_too(executor):
    process = executor._processes[1]
    lock = process._popen._waitpid_lock
    assert process.exit_code() is None
    with lock:
        os.kill(process.pid, signal.SIGKILL)
        found = []
        thread = threading.Thread(target=lambda: found.append(process.exit_code()))
        while not has_ended(process):
            time.sleep(0.01)
        thread.start()
        thread.join(0.1)
        assert not found
    thread.join(5)
    assert found == [-signal.SIGKILL]


def has_ended(process):
    """Tell whether the system has told of the process' end."""
    poller = select.poll()
    poller.register(process.end, select.POLLIN)
    return bool(poller.poll(0))


def test_after_a_death_and_a_shutdown_new_workers_can_be_started(executor):
    for rank in (1, 0):
        os.kill(pids(executor)[rank], signal.SIGKILL)
        with pytest.raises(ExecutorError, match=f"rank {rank} was killed"):
            executor.collective_rpc("sleep", (30,))
        executor.shutdown()
        executor.start()
        assert executor.execute_model(1).result(5) == (0, 1)
        assert executor.collective_rpc("seen_steps") == [[1] for _ in pids(executor)]


def test_processes_that_cannot_be_started_are_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    executor = MultiProcExecutor(ToyWorker, num_workers=2, output_rank=0)
    with pytest.raises(ExecutorError, match=r"the worker of rank 0 could not be started: .*nowhere"):
        executor.start()


def test_workers_outlive_the_thread_that_started_them():
    executor = MultiProcExecutor(ToyWorker, num_workers=2, output_rank=0)
    thread = threading.Thread(target=executor.start)
    thread.start()
    thread.join(20)
    time.sleep(0.2)
    assert executor.collective_rpc("add", (1,)) == [1, 1]
    executor.shutdown()


PROGRAM = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from toy_worker import ToyWorker
from girih.executor.multiproc import MultiProcExecutor

executor = MultiProcExecutor(ToyWorker, num_workers=4, output_rank=0)
executor.start()
pids = [pid for _, pid, _ in executor.collective_rpc("where")]
executor.execute_model({"sleep": 60, "rank": 1})
os.kill(pids[3], signal.SIGSTOP)
print(*pids, flush=True)
if sys.argv[1] == "wait":
    time.sleep(60)
elif sys.argv[1] == "raise":
    raise RuntimeError
"""


@pytest.mark.parametrize("end", ["kill", "term", "interrupt", "return", "raise"])
def test_no_worker_and_no_segment_outlives_a_parent_that_ends_without_a_shutdown(end):  # case 96
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    how = end if end in ("return", "raise") else "wait"
    parent = subprocess.Popen(  # in a session of its own: a signal to its group is what a terminal sends
        [sys.executable, "-c", PROGRAM, how],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    workers = list(map(int, parent.stdout.readline().split()))
    assert len(workers) == 4
    if how == "wait":
        assert all(map(is_running, workers))
        assert not any(map(named_memory, (parent.pid, *workers)))
        number = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "interrupt": signal.SIGINT}[end]
        os.killpg(parent.pid, number)
    parent.wait(10)
    parent.stdout.close()
    deadline = time.monotonic() + 2
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in workers if is_running(pid)]


def test_the_shared_memory_has_no_name(executor):
    for pid in (os.getpid(), *pids(executor)):
        assert "/memfd:girih-ring (deleted)" in Path(f"/proc/{pid}/maps").read_text()
        assert not named_memory(pid)
