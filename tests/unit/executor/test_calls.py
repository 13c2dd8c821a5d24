"""The book of calls under way: who must answer, what the first error does, when time is up."""

import time

import pytest

from girih.errors import ExecutorError
from girih.executor._calls import Calls


@pytest.fixture
def calls():
    failures = []
    calls = Calls(on_failure=lambda: failures.append(1), num_workers=1)
    calls.failures = failures
    calls.open()
    return calls


def step(calls, limit_s=10.0):
    return calls.add("execute_model", (1,), limit_s, is_step=True)


def test_a_call_ends_when_all_have_answered_and_a_step_when_its_rank_has(calls):
    tag, call = calls.add("f", (0, 1, 2), 10)
    for rank in (2, 0):
        calls.answer(tag, rank, rank * 10)
    assert not call.future.done()
    calls.answer(tag, 1, 10)
    assert call.future.result(0) == [0, 10, 20]
    tag, call = step(calls)
    calls.answer(tag, 0, "not asked for")
    assert not call.future.done()
    calls.answer(tag, 1, "output")
    assert call.future.result(0) == "output"


def test_the_first_error_ends_a_call_and_those_of_the_others_are_the_same_failure(calls):
    tag, call = calls.add("f", (0, 1), 10)
    calls.error(tag, ExecutorError("first"))
    with pytest.raises(ExecutorError, match="first"):
        call.future.result(0)
    calls.error(tag, ExecutorError("second"))
    calls.answer(tag, 1, 1)
    calls.check()


def test_an_error_of_a_step_ends_everything_where_others_may_wait_for_the_worker():
    calls = Calls(on_failure=lambda: None, num_workers=2)
    calls.open()
    (tag, first), (_, second) = step(calls), step(calls)
    error = ExecutorError("worker of rank 1 failed")
    calls.error(tag, error)
    assert first.future.exception(0) is error
    assert str(second.future.exception(0)) == str(error)
    with pytest.raises(ExecutorError, match="cannot be used: worker of rank 1 failed"):
        calls.check()


def test_an_error_behind_the_output_of_its_step_ends_everything(calls):
    (first, _), (_, second) = step(calls), step(calls)
    calls.answer(first, 1, "output")
    calls.error(first, ExecutorError("worker of rank 0 failed"))
    with pytest.raises(ExecutorError, match="rank 0 failed"):
        second.future.result(0)
    with pytest.raises(ExecutorError, match="cannot be used: worker of rank 0 failed"):
        calls.check()


def test_a_failure_ends_all_calls_and_takes_no_more_and_the_first_reason_stays(calls):
    (_, first), (tag, second) = step(calls), calls.add("f", (0,), 10)
    calls.fail("dead")
    calls.fail("shut down")
    for call in (first, second):
        with pytest.raises(ExecutorError, match="dead"):
            call.future.result(0)
    calls.error(tag, ExecutorError("late"))
    with pytest.raises(ExecutorError, match="cannot be used: dead"):
        step(calls)
    assert calls.failures == [1]


def test_the_time_of_a_step_begins_when_the_one_before_has_ended(calls):
    (first, _), (second, later), (_, other) = step(calls, 0.1), step(calls, 0.1), calls.add("f", (0,), 0.3)
    time.sleep(0.06)
    calls.answer(first, 1, None)
    time.sleep(0.06)
    assert calls.overdue() is None
    time.sleep(0.06)
    assert calls.overdue() is later
    calls.answer(second, 1, None)
    assert calls.next_deadline() == other.deadline
    assert calls.overdue() is None


def test_who_gives_up_waiting_marks_the_workers_as_failed(calls):
    _, call = step(calls)
    with pytest.raises(TimeoutError):
        call.future.result(0.01)
    with pytest.raises(ExecutorError, match=r"execute_model did not return within 0\.01 s"):
        calls.check()
