"""The executor of Ray actors when one dies or hangs, or the parent does: told in time, and nothing is left."""

import os
import signal
import subprocess
import sys
import time

import pytest
from toy_worker import ToyWorker, is_running

from girih.errors import ExecutorError

pytestmark = pytest.mark.xdist_group("ray")


def made(num_workers=2, worker=ToyWorker):
    from girih.executor._ray_executor import RayExecutor

    return RayExecutor(worker, num_workers=num_workers, output_rank=0)


@pytest.fixture
def executor(ray_cluster):
    executor = made()
    executor.start()
    pids = running(executor)
    yield executor
    executor.shutdown()
    assert not any(map(is_running, pids))


def running(executor):
    return [pid for _, pid, _ in executor.collective_rpc("where")]


def test_killed_workers_fail_all_steps_or_are_noticed_without_one_and_new_ones_can_be_started(executor):  # case 96
    first, second = running(executor)
    futures = [executor.execute_model({"sleep": 30}) for _ in range(3)]
    time.sleep(0.1)
    start = time.monotonic()
    os.kill(second, signal.SIGKILL)
    for future in futures:
        with pytest.raises(ExecutorError, match=rf"the worker of rank 1 \(process {second} on .*\) has ended: .*died"):
            future.result(5)
    assert time.monotonic() - start < 5
    for call in (executor.check_health, lambda: executor.execute_model(1), lambda: executor.collective_rpc("where")):
        with pytest.raises(ExecutorError, match=r"cannot be used: the worker of rank 1 .* memory runs out"):
            call()
    executor.shutdown()
    assert not is_running(first)

    executor.start()
    assert executor.execute_model(1).result(5) == (0, 1)
    os.kill(running(executor)[0], signal.SIGKILL)
    time.sleep(3)
    with pytest.raises(ExecutorError, match=r"the worker of rank 0 .* has ended"):  # though nobody has called it
        executor.check_health()


def test_a_stopped_worker_fails_a_call_when_its_time_is_up_and_is_named_and_ended(executor):  # case 97
    pids = running(executor)
    os.kill(pids[1], signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(ExecutorError, match=r"worker of rank 1: add did not return within 0\.5 s"):
        executor.collective_rpc("add", (1,), timeout_s=0.5)
    assert 0.5 <= time.monotonic() - start < 2
    with pytest.raises(ExecutorError, match=r"cannot be used: .*add did not return"):
        executor.check_health()
    executor.shutdown()
    assert time.monotonic() - start < 15
    assert not any(map(is_running, pids))


def test_a_step_whose_time_is_up_fails_though_nobody_waits(executor):
    executor.step_timeout_s = 0.5
    futures = [executor.execute_model({"sleep": 0.3}) for _ in range(4)]
    for future in futures:  # each is given its time from when it can begin
        assert future.result(5)[0] == 0
    future = executor.execute_model({"sleep": 60, "rank": 0})
    time.sleep(1)
    with pytest.raises(ExecutorError, match=r"rank 0: execute_model did not return within 0\.5 s"):
        future.result(0)


def test_an_actor_that_ray_kills_and_one_that_exits_are_blamed_for_the_errors_of_others(executor, monkeypatch):
    import ray

    from girih.executor import _ray_executor

    monkeypatch.setattr(_ray_executor, "BLAME_S", 5)
    with pytest.raises(ExecutorError, match=r"^the worker of rank 1 .* has ended: "):
        executor.collective_rpc("miss", (1,))
    executor.shutdown()
    executor.start()
    future = executor.execute_model({"sleep": 30})
    ray.kill(executor._workers._actors[1])
    with pytest.raises(ExecutorError, match=r"the worker of rank 1 .* has ended: .*ray\.kill"):
        future.result(5)


@pytest.mark.soak
def test_a_worker_that_ends_by_itself_or_behind_the_output_of_its_step_ends_everything(executor):
    for method, args in (("exit", (3, 1)), ("exit", (0, 1)), ("crash", (1,))):
        start = time.monotonic()
        with pytest.raises(ExecutorError, match=r"the worker of rank 1 .* has ended"):
            executor.collective_rpc(method, args)
        assert time.monotonic() - start < 5
        executor.shutdown()
        executor.start()
    future = executor.execute_model({"sleep": 0.2, "raise": "late", "rank": 1})
    assert future.result(5)[0] == 0
    time.sleep(2)
    with pytest.raises(ExecutorError, match="rank 1 failed in execute_model: ValueError: late"):
        executor.check_health()


@pytest.mark.soak
def test_a_machine_that_goes_takes_its_worker_with_it_and_is_told(ray_cluster):
    executor = made(3)
    executor.start()
    pids = running(executor)
    future = executor.execute_model({"sleep": 60})
    (node,) = ray_cluster.worker_nodes
    start = time.monotonic()
    ray_cluster.remove_node(node, allow_graceful=False)
    try:
        with pytest.raises(ExecutorError, match=r"the worker of rank 2 .* has ended"):
            future.result(30)
        assert time.monotonic() - start < 30
        executor.shutdown()
        assert not any(map(is_running, pids))
    finally:
        ray_cluster.add_node(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False)
        ray_cluster.wait_for_nodes()


PROGRAM = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from toy_worker import ToyWorker
from girih.executor._ray_executor import RayExecutor

executor = RayExecutor(ToyWorker, num_workers=2, output_rank=0)
executor.start()
where = executor.collective_rpc("where")
executor.execute_model({"sleep": 60, "rank": 1})
print(*(pid for _, pid, _ in where), where[0][2], flush=True)
time.sleep(60)
"""


def no_process_outlives(address, number):
    parent = subprocess.Popen(  # in a session of its own: a signal to its group is what a terminal sends
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "RAY_ADDRESS": address},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    *workers, raylet = map(int, parent.stdout.readline().split())
    assert all(map(is_running, workers))
    os.killpg(parent.pid, number)
    parent.wait(30)
    parent.stdout.close()
    doomed = workers if address != "local" else [*workers, raylet]
    deadline = time.monotonic() + 10
    while any(map(is_running, doomed)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in doomed if is_running(pid)]


def test_no_actor_outlives_a_parent_that_is_killed(ray_cluster):  # case 96
    no_process_outlives(ray_cluster.address, signal.SIGKILL)


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_cluster_of_our_own_ends_with_its_parent(number):
    no_process_outlives("local", number)


@pytest.mark.soak
def test_an_address_where_no_cluster_is_says_so_in_bounded_time():
    program = (
        "from girih.executor._ray_executor import RayExecutor; from toy_worker import ToyWorker; "
        "RayExecutor(ToyWorker, num_workers=1, output_rank=0).start()"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "RAY_ADDRESS": "127.0.0.1:1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert "ExecutorError: Ray (RAY_ADDRESS=127.0.0.1:1) was not there within 90 s" in run.stderr
