"""The executor of Ray actors: places, starts and ends. What it shares with multiproc is in test_remote_executors.py."""

import sys
import threading
import time

import pytest
from toy_worker import BrokenToyWorker, ToyWorker, UnreleasableToyWorker, is_running

import girih
from girih.config import EngineConfig
from girih.errors import ConfigError, ExecutorError
from girih.executor import ray as ray_plugin

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture
def made(ray_cluster):
    """Make executors on a cluster of which nothing is in use; they are shut down at the end."""
    import ray

    from girih.executor._ray_executor import RayExecutor

    deadline = time.monotonic() + 20
    while ray.available_resources().get("CPU") != 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    executors = []

    def make(num_workers=2, worker=ToyWorker):
        executors.append(RayExecutor(worker, num_workers=num_workers, output_rank=0))
        return executors[-1]

    yield make
    for executor in executors:
        executor.shutdown()


def running(executor):
    return [pid for _, pid, _ in executor.collective_rpc("where")]


def places():
    """Return the placement groups that hold CPUs."""
    from ray.util import placement_group_table

    return [group for group in placement_group_table().values() if group["state"] != "REMOVED"]


def test_neighbours_are_on_one_machine_and_meet_at_a_port_of_the_first(made):
    executor = made(3)
    executor.start()
    raylets = [parent for _, _, parent in executor.collective_rpc("where")]
    assert len(set(raylets)) == 2
    assert raylets[1] in (raylets[0], raylets[2])  # Ray chooses which machine gets two
    (place,) = set(executor.collective_rpc("meeting_place"))
    assert place.startswith("tcp://")
    assert int(place.rpartition(":")[2]) > 1023
    executor.shutdown()
    assert not places()


def test_a_shutdown_ends_the_actors_and_a_start_makes_new_ones(made, capfd):
    executor = made(1)
    executor.shutdown()
    with pytest.raises(ExecutorError, match="they were not started"):
        executor.check_health()
    threads = threading.active_count()
    for _ in range(2):
        executor.start()
        assert executor.collective_rpc("meeting_place") == [None]
        (pid,) = running(executor)
        executor.collective_rpc("log", ("hello",))
        executor.shutdown()
        executor.shutdown()
        assert not is_running(pid)
        assert not places()
        with pytest.raises(ExecutorError, match="they were shut down"):
            executor.execute_model(1)
    assert threading.active_count() <= threads + 1  # Ray may add one of its own
    said, deadline = "", time.monotonic() + 10
    while "printed hello" not in said and time.monotonic() < deadline:
        time.sleep(0.1)
        captured = capfd.readouterr()
        said += captured.err
        assert not captured.out
    assert "worker of rank 0: WARNING: toy: hello" in said


def test_a_worker_that_cannot_be_made_says_why_and_nothing_is_left(made):  # case 98
    executor = made(worker=BrokenToyWorker)
    with pytest.raises(ExecutorError, match=r"^worker of rank 1 failed in start: OSError: no such device"):
        executor.start()
    with pytest.raises(ExecutorError, match=r"cannot be used: the start failed: .*no such device"):
        executor.check_health()
    assert not places()


def test_an_error_while_a_worker_releases_what_it_holds_is_reported_and_it_ends(made):
    executor = made(1, UnreleasableToyWorker)
    executor.start()
    (pid,) = running(executor)
    with pytest.raises(ExecutorError, match="failed in shutdown: ValueError: cannot let go"):
        executor.shutdown()
    assert not is_running(pid)


def test_more_workers_than_cpus_are_refused_at_once_with_the_way_out(made):
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"5 workers need 5 CPUs, one each; the Ray cluster has 4: .*--num-cpus"):
        made(5).start()
    assert time.monotonic() - start < 5


def test_cpus_that_others_use_are_waited_for_in_vain_and_not_for_ever(made, monkeypatch):
    from girih.executor import _ray_workers

    other = made(2)
    other.start()
    monkeypatch.setattr(_ray_workers, "PLACE_TIMEOUT_S", 0.5)
    with pytest.raises(
        ExecutorError, match=r"of the Ray cluster's 4 only [0-2] became free within 0\.5 s: end what uses"
    ):
        made(3).start()
    other.shutdown()
    assert not places()


def test_another_version_of_girih_on_a_machine_is_refused(made, monkeypatch):
    monkeypatch.setattr(girih, "__version__", "0.0.7", raising=False)
    with pytest.raises(ConfigError, match=r"rank 0 on .* has girih .*, the engine has 0\.0\.7: install the same"):
        made(1).start()
    assert not places()


def test_the_engine_s_executor_has_a_worker_per_rank_and_the_last_stage_s_first_one_answers():
    config = EngineConfig(model="m", executor="ray", tensor_parallel_size=2, pipeline_parallel_size=3)
    executor = ray_plugin.create(config)
    assert executor._ranks == range(6)
    assert executor._output_rank == 4
    assert not executor.workers_are_local


def test_without_ray_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'girih\[ray\]'"):
        ray_plugin.create(EngineConfig(model="m", executor="ray"))
