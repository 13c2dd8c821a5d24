"""The executor of one worker in this process: order, errors with rank and text, bounded time, clean end."""

import os
import threading

import pytest

from girih.errors import CapacityError, ExecutorError
from girih.executor.uniproc import UniProcExecutor
from tests.forked import in_a_copy_of_this_process


class FakeWorker:
    def __init__(self):
        self.calls = []
        self.release = threading.Event()
        self.thread = threading.current_thread()

    def add(self, *args):
        self.calls.append(args)
        return sum(args)

    def thread_of_call(self):
        return threading.current_thread()

    def fail(self):
        raise ValueError("x")

    def refuse(self):
        raise CapacityError("too big", need_bytes=2, have_bytes=1, fitting_tokens=None)

    def time_out(self):
        raise TimeoutError("a socket")

    def stuck(self):
        self.release.wait(5)

    def execute_model(self, step):
        if step == "stuck":
            self.stuck()
        self.calls.append(step)
        return step

    def shutdown(self):
        self.calls.append("shutdown")


@pytest.fixture
def executor():
    executor = UniProcExecutor(FakeWorker)
    executor.start()
    yield executor
    executor.shutdown()


def test_calls_reach_the_worker_and_answers_come_by_rank(executor):
    assert executor.collective_rpc("add", (1, 2)) == [3]
    assert executor.collective_rpc("add", args_by_rank=[(3, 4)]) == [7]


def test_the_worker_is_made_and_called_on_one_thread_that_is_not_ours(executor):
    (thread,) = executor.collective_rpc("thread_of_call")
    assert thread is executor._worker.thread
    assert thread is not threading.current_thread()


def test_steps_are_done_in_order(executor):
    futures = [executor.execute_model(i) for i in range(5)]
    assert [future.result(5) for future in futures] == list(range(5))
    assert executor._worker.calls == list(range(5))


def test_an_error_carries_rank_method_and_original_text_and_the_worker_lives(executor):
    with pytest.raises(ExecutorError, match=r"rank 0 failed in fail: ValueError: x") as caught:
        executor.collective_rpc("fail")
    assert isinstance(caught.value.__cause__, ValueError)
    assert executor.collective_rpc("add", (1,)) == [1]


def test_an_error_for_the_user_arrives_unchanged(executor):
    with pytest.raises(CapacityError) as caught:
        executor.collective_rpc("refuse")
    assert caught.value.need_bytes == 2


def test_a_timeout_of_the_worker_s_own_is_not_taken_for_a_stuck_worker(executor):
    with pytest.raises(ExecutorError, match="TimeoutError: a socket"):
        executor.collective_rpc("time_out")
    executor.check_health()


def test_a_stuck_worker_is_an_error_in_bounded_time_and_is_not_used_again():  # case 97
    executor = UniProcExecutor(FakeWorker)
    executor.start()
    worker = executor._worker
    with pytest.raises(ExecutorError, match=r"rank 0: stuck did not return within 0\.05 s"):
        executor.collective_rpc("stuck", timeout_s=0.05)
    with pytest.raises(ExecutorError, match="cannot be used"):
        executor.check_health()
    with pytest.raises(ExecutorError, match="cannot be used"):
        executor.execute_model(1)
    executor.shutdown()
    worker.release.set()


def test_a_step_that_nobody_waits_for_any_more_marks_the_worker_as_failed():
    executor = UniProcExecutor(FakeWorker)
    executor.start()
    worker = executor._worker
    future = executor.execute_model("stuck")
    executor.check_health()
    with pytest.raises(TimeoutError):
        future.result(0.02)
    with pytest.raises(ExecutorError, match=r"execute_model did not return within 0\.02 s"):
        executor.check_health()
    executor.shutdown()
    worker.release.set()


@pytest.mark.parametrize("is_known", [False, True])
def test_a_busy_worker_does_not_fail_the_shutdown_and_ends_after_its_call(monkeypatch, caplog, is_known):
    monkeypatch.setattr("girih.executor.uniproc.SHUTDOWN_TIMEOUT_S", 0.05)
    executor = UniProcExecutor(FakeWorker)
    executor.start()
    worker, thread = executor._worker, executor._thread
    future = executor.execute_model("stuck")
    if is_known:
        with pytest.raises(TimeoutError):
            future.result(0.02)
    executor.shutdown()
    executor.shutdown()
    assert "is busy" in caplog.text
    assert thread.is_alive()
    worker.release.set()
    thread.join(5)
    assert not thread.is_alive()
    assert worker.calls == ["stuck", "shutdown"]


def test_an_error_while_the_worker_releases_what_it_holds_is_reported(monkeypatch):
    executor = UniProcExecutor(FakeWorker)
    executor.start()
    monkeypatch.setattr(executor._worker, "shutdown", executor._worker.fail)
    with pytest.raises(ExecutorError, match="rank 0 failed in shutdown: ValueError: x"):
        executor.shutdown()


def test_a_worker_that_cannot_be_made_says_why():  # case 98
    def broken():
        raise OSError("no such device")

    executor = UniProcExecutor(broken)
    with pytest.raises(ExecutorError, match="rank 0 failed in start: OSError: no such device"):
        executor.start()
    executor.shutdown()


def test_shutdown_releases_the_worker_ends_the_thread_and_may_be_repeated():
    executor = UniProcExecutor(FakeWorker)
    executor.start()
    worker, thread = executor._worker, executor._thread
    executor.shutdown()
    executor.shutdown()
    assert worker.calls == ["shutdown"]
    assert not thread.is_alive()
    with pytest.raises(ExecutorError, match="it was shut down"):
        executor.collective_rpc("add")


def test_a_copy_of_this_process_is_refused_the_worker_and_ends_at_once(executor):
    def use():
        with pytest.raises(ExecutorError, match=rf"belong to process {os.getppid()}, .* a copy \(fork\)"):
            executor.execute_model("step")
        executor.shutdown()

    in_a_copy_of_this_process(use)
    assert executor.collective_rpc("add", (1, 2)) == [3]
