"""Calls that are played again: in order, by any number of threads, as if each had been waited for."""

import pytest
import torch

from girih.kernels import threads
from girih.kernels.convert import converted
from girih.kernels.tape import Tape
from girih.kernels.threads import recorded_calls


@pytest.fixture(params=[1, 2, 9])
def num_threads(request, monkeypatch):
    """Let each row be worth a thread, also where there are more threads than cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(threads, "THREAD_ELEMENTS", 1)
    yield request.param
    torch.set_num_threads(before)


def chain(x, length):
    """Add 1 to x as often; rows are of another size each time, so that a thread reads what others have written."""
    made, one = [x], torch.ones(x.numel())
    for i in range(length):
        made.append(converted(made[-1].view(x.shape if i % 2 else x.shape[::-1]), torch.float32, bias=one))
    return made, one


def test_a_tape_computes_again_what_was_recorded(num_threads):
    x = torch.zeros(32, 48)
    with recorded_calls() as calls:
        made, _kept = chain(x, 40)
    assert len(calls) == 40
    tape = Tape(calls)
    for start in range(200):
        x.fill_(start)
        made[-1].fill_(-1)
        tape.play()
        assert (made[-1] == start + 40).all(), start


def test_calls_of_one_thread_and_of_many_wait_for_each_other(num_threads, monkeypatch):
    x = torch.zeros(16, 16)
    one = torch.ones(16)
    with recorded_calls() as calls:
        made = [x]
        for i in range(30):
            monkeypatch.setattr(threads, "THREAD_ELEMENTS", 1 if i % 3 else 1 << 16)
            made.append(converted(made[-1], torch.float32, bias=one))
    tape = Tape(calls)
    for _ in range(200):
        made[-1].fill_(-1)
        tape.play()
        assert (made[-1] == 30).all()


def test_nothing_is_recorded_but_what_one_thread_of_python_calls_meanwhile():
    converted(torch.zeros(1, 16), torch.float32)
    with recorded_calls() as outer:
        converted(torch.zeros(1, 16), torch.float32)
        with recorded_calls() as inner:
            converted(torch.zeros(1, 16), torch.bfloat16)
        converted(torch.zeros(1, 16), torch.float32)
    assert (len(outer), len(inner)) == (2, 1)


def test_an_empty_tape_plays_nothing():
    Tape([]).play()
