"""What executors with workers in other processes have in common: order, ranks, errors of methods, big messages."""

import os
import signal
import threading

import numpy as np
import pytest
from toy_worker import ToyWorker

from girih.errors import CapacityError, ExecutorError
from girih.executor.multiproc import MultiProcExecutor
from tests.forked import in_a_copy_of_this_process


def multiproc(num_workers):
    return MultiProcExecutor(ToyWorker, num_workers=num_workers, output_rank=num_workers - 1)


def ray(num_workers):
    from girih.executor._ray_executor import RayExecutor

    return RayExecutor(ToyWorker, num_workers=num_workers, output_rank=num_workers - 1)


@pytest.fixture(
    scope="module",
    params=[(multiproc, 2), (multiproc, 4), pytest.param((ray, 3), marks=pytest.mark.xdist_group("ray"))],
    ids=["multiproc-2", "multiproc-4", "ray-3"],
)
def executor(request):
    make, num_workers = request.param
    if make is ray:
        request.getfixturevalue("ray_cluster")
    executor = make(num_workers)
    executor.start()
    yield executor
    executor.shutdown()


def ranks(executor):
    return list(executor._ranks)


def pids(executor):
    return [pid for _, pid, _ in executor.collective_rpc("where")]


def test_arguments_are_the_same_for_all_or_one_tuple_per_rank(executor):
    assert executor.collective_rpc("add", (1, 2)) == [3 for _ in ranks(executor)]
    assert executor.collective_rpc("add", args_by_rank=[(rank, 10) for rank in ranks(executor)]) == [
        10 + rank for rank in ranks(executor)
    ]
    with pytest.raises(ValueError, match="arguments for 1 workers"):
        executor.collective_rpc("add", args_by_rank=[(1,)])


def test_several_steps_in_flight_are_done_in_order_by_all_and_answered_by_the_output_rank(executor):
    before = len(executor.collective_rpc("seen_steps")[0])
    futures = [executor.execute_model(i) for i in range(50)]
    assert [future.result(5) for future in futures] == [(executor._output_rank, i) for i in range(50)]
    for steps in executor.collective_rpc("seen_steps"):
        assert steps[before:] == list(range(50))


def test_many_small_messages_of_several_threads_find_their_callers(executor):
    wrong = []

    def call(start):
        for i in range(start, start + 200):
            if executor.collective_rpc("add", (i, 1)) != [i + 1 for _ in ranks(executor)]:
                wrong.append(i)

    threads = [threading.Thread(target=call, args=(1000 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_messages_of_30_mb_go_through_both_ways(executor):
    array = np.arange(30 << 20, dtype=np.uint8)
    assert executor.collective_rpc("total", (array,)) == [(int(array.sum()), True, True) for _ in ranks(executor)]
    for answer in executor.collective_rpc("ones", (30 << 20,)):
        assert answer.nbytes == 30 << 20
        assert answer.all()


def test_an_error_carries_rank_method_and_original_text_and_the_workers_live(executor):
    with pytest.raises(ExecutorError, match="x of 1") as caught:
        executor.collective_rpc("fail", (1,))
    assert str(caught.value) == "worker of rank 1 failed in fail: ValueError: x of 1"
    assert "in fail\n" in caught.value.__notes__[0]  # the traceback of the worker
    assert executor.collective_rpc("add", (1,)) == [1 for _ in ranks(executor)]


def test_an_error_for_the_user_arrives_as_itself(executor):
    with pytest.raises(CapacityError, match=r"^too big") as caught:
        executor.collective_rpc("refuse")
    assert (caught.value.need_bytes, caught.value.have_bytes, caught.value.fitting_tokens) == (2, 1, None)


def test_an_unknown_method_and_what_cannot_be_sent_are_errors_and_no_more(executor):
    with pytest.raises(ExecutorError, match=r"rank . failed in nothing: AttributeError"):
        executor.collective_rpc("nothing")
    with pytest.raises(ExecutorError, match=r"failed in give_lambda: .*lambda"):
        executor.collective_rpc("give_lambda")
    with pytest.raises(ExecutorError, match=r"the arguments of same cannot be sent: .*lambda"):
        executor.collective_rpc("same", (lambda: None,))
    assert executor.collective_rpc("same", ("fine",)) == ["fine" for _ in ranks(executor)]


def test_workers_ignore_ctrl_c_and_are_in_no_group_that_the_terminal_signals(executor):
    for pid in pids(executor):
        assert os.getpgid(pid) != os.getpgid(0)
        os.kill(pid, signal.SIGINT)
    assert executor.collective_rpc("add", (1,)) == [1 for _ in ranks(executor)]


def test_workers_load_neither_numba_nor_the_program_s_main_module(executor):
    assert executor.collective_rpc("loaded", ("numba", "torch", "pytest")) == [[] for _ in ranks(executor)]


def test_a_copy_of_this_process_is_refused_the_workers_and_harms_none(executor):
    def use():
        for call in (
            lambda: executor.execute_model(1),
            executor.check_health,
            lambda: executor.collective_rpc("where"),
        ):
            with pytest.raises(ExecutorError, match=rf"belong to process {os.getppid()}, .* a copy \(fork\)"):
                call()
        executor.shutdown()

    before = pids(executor)
    in_a_copy_of_this_process(use)
    assert pids(executor) == before
