"""The executor of worker processes while all is well: order, ranks, errors of methods, big messages, the end."""

import logging
import os
import signal
import threading
import time

import pytest
from toy_worker import BrokenToyWorker, SlowToyWorker, ToyWorker, UnreleasableToyWorker, is_running

from girih.config import EngineConfig
from girih.errors import ExecutorError
from girih.executor import _remote, multiproc
from girih.executor.multiproc import MultiProcExecutor

NUM_WORKERS = (2, 4)


def made(num_workers=2, worker=ToyWorker, output_rank=None):
    output_rank = num_workers - 1 if output_rank is None else output_rank
    return MultiProcExecutor(worker, num_workers=num_workers, output_rank=output_rank)


@pytest.fixture(scope="module", params=NUM_WORKERS)
def executor(request):
    executor = made(request.param)
    executor.start()
    yield executor
    executor.shutdown()


def ranks(executor):
    return list(executor._ranks)


def pids(executor):
    return [pid for _, pid, _ in executor.collective_rpc("where")]


def test_answers_come_by_rank_from_processes_of_their_own_that_are_our_children(executor):
    where = executor.collective_rpc("where")
    assert [rank for rank, _, _ in where] == ranks(executor)
    assert len({pid for _, pid, _ in where} | {os.getpid()}) == len(where) + 1
    assert {parent for _, _, parent in where} == {os.getpid()}


def test_an_error_of_a_lone_worker_fails_its_step_only():
    executor = made(1)
    executor.start()
    bad = executor.execute_model({"raise": "y"})
    good = executor.execute_model("next")
    with pytest.raises(ExecutorError, match="rank 0 failed in execute_model: ValueError: y"):
        bad.result(5)
    assert good.result(5) == (0, "next")
    executor.check_health()
    executor.shutdown()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_of_several_ends_all_steps_as_others_may_wait_for_it_in_the_middle(rank):
    executor = made(2)
    executor.start()
    before = executor.execute_model({"sleep": 0.3, "rank": 1})  # so that rank 0 is ahead
    bad = executor.execute_model({"raise": "z", "rank": rank})
    behind = executor.execute_model("next")
    assert rank == 0 or before.result(5)[0] == 1
    for future in (bad, behind):
        with pytest.raises(ExecutorError, match=f"rank {rank} failed in execute_model: ValueError: z"):
            future.result(5)
    with pytest.raises(ExecutorError, match=f"cannot be used: .*rank {rank} failed in execute_model"):
        executor.check_health()
    start = time.monotonic()
    executor.shutdown()
    assert time.monotonic() - start < _remote.SHUTDOWN_TIMEOUT_S, "nobody was asked to release anything"


def test_workers_meet_at_a_file_without_a_name_unless_there_is_one(executor):
    (place,) = set(executor.collective_rpc("meeting_place"))
    assert place.startswith("file:///proc/self/fd/")
    alone = made(1)
    alone.start()
    assert alone.collective_rpc("meeting_place") == [None]
    alone.shutdown()


def test_a_program_without_standard_input_has_workers_too():
    saved = os.dup(0)
    os.close(0)  # the next descriptor that anybody opens is 0, which a child finds taken by its own standard input
    try:
        executor = made()
        executor.start()
        assert executor.collective_rpc("add", (1, 2)) == [3, 3]
        executor.shutdown()
    finally:
        os.dup2(saved, 0)
        os.close(saved)


def test_more_ranks_than_any_model_has_heads_cost_nothing_before_they_are_refused():
    with pytest.raises(ExecutorError, match="not started"):
        made(10**9).check_health()


def test_logs_and_whole_lines_that_workers_print_reach_stderr_with_the_rank(capfd, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")  # a worker would write word by word
    executor = made()
    executor.start()
    executor.collective_rpc("log", ("hello",))
    executor.shutdown()
    out, err = capfd.readouterr()
    assert not out
    for rank in (0, 1):
        assert f"worker of rank {rank}: WARNING: toy: hello\n" in err
        assert f"worker of rank {rank}: WARNING: toy: released\n" in err
    assert err.splitlines().count("printed hello") == 2


def test_a_worker_that_cannot_be_made_says_why_and_all_processes_end():  # case 98
    executor = made(worker=BrokenToyWorker)
    with pytest.raises(ExecutorError, match=r"^worker of rank 1 failed in start: OSError: no such device"):
        executor.start()
    assert not any(is_running(process.pid) for process in executor._processes)
    with pytest.raises(ExecutorError, match=r"cannot be used: the start failed: .*no such device"):
        executor.check_health()
    executor.shutdown()


@pytest.fixture
def _interrupts():
    """Let SIGINT raise; a shell's background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts")
def test_an_interrupted_start_leaves_no_process():
    executor = made(worker=SlowToyWorker)
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        executor.start()
    assert time.monotonic() - start < 5
    assert len(executor._processes) == 2
    assert not any(is_running(process.pid) for process in executor._processes)


def test_shutdown_before_start_and_twice_does_nothing_and_the_workers_are_released_once(capfd):
    executor = made()
    executor.shutdown()
    with pytest.raises(ExecutorError, match="they were not started"):
        executor.check_health()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    executor.start()
    running = pids(executor)
    executor.shutdown()
    executor.shutdown()
    assert not any(map(is_running, running))
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads
    with pytest.raises(ExecutorError, match="they were shut down"):
        executor.execute_model(1)
    assert capfd.readouterr().err.count("released") == 2


def test_after_a_shutdown_it_can_be_started_again():
    executor = made()
    for _ in range(2):
        executor.start()
        assert executor.collective_rpc("add", (1,)) == [1, 1]
        executor.shutdown()


def test_a_busy_worker_does_not_fail_the_shutdown_and_what_it_owes_fails(monkeypatch, caplog):
    monkeypatch.setattr(_remote, "SHUTDOWN_TIMEOUT_S", 0.3)
    executor = made()
    executor.start()
    running = pids(executor)
    future = executor.execute_model({"sleep": 60})
    start = time.monotonic()
    executor.shutdown()
    assert time.monotonic() - start < 3
    assert not any(map(is_running, running))
    assert "shutdown did not return within 0.3 s" in caplog.text
    with pytest.raises(ExecutorError, match="shutdown did not return"):
        future.result(0)


def test_steps_that_are_short_are_finished_before_the_shutdown():
    executor = made()
    executor.start()
    future = executor.execute_model({"sleep": 0.3})
    executor.shutdown()
    assert future.result(0) == (1, {"sleep": 0.3})


def test_an_error_while_a_worker_releases_what_it_holds_is_reported_and_all_end():
    executor = made(worker=UnreleasableToyWorker)
    executor.start()
    running = pids(executor)
    with pytest.raises(ExecutorError, match="failed in shutdown: ValueError: cannot let go"):
        executor.shutdown()
    assert not any(map(is_running, running))


def test_the_engine_s_executor_has_a_worker_per_rank_and_the_last_stage_s_first_one_answers():
    for tensor, pipeline, output_rank in [(1, 1, 0), (3, 1, 0), (1, 3, 2), (2, 3, 4)]:
        config = EngineConfig(
            model="m", executor="multiproc", tensor_parallel_size=tensor, pipeline_parallel_size=pipeline
        )
        executor = multiproc.create(config)
        assert executor._ranks == range(tensor * pipeline)
        assert executor._output_rank == output_rank


def test_a_log_level_of_the_parent_is_the_workers(capfd):
    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.ERROR)
    try:
        executor = made()
        executor.start()
        executor.collective_rpc("log", ("hello",))
        executor.shutdown()
    finally:
        logging.getLogger().setLevel(level)
    assert "toy: hello" not in capfd.readouterr().err
