"""The arrays of running requests: outputs of any length, kept over a preemption, and who may have ended."""

import numpy as np

from girih.request import SamplingParams
from girih.sched.request_state import RequestState
from girih.sched.rows import RunningRows


def request(name, *, max_tokens=1000, eos=(), stop=()):
    params = SamplingParams(seed=0, stop_token_ids=stop)
    return RequestState(name, np.array([1, 2, 3], dtype=np.int32), params, max_tokens, frozenset(eos))


def append(rows, tokens):
    """Append row -> token; return the rows that may have ended."""
    numbers = np.array([*tokens], dtype=np.int32)
    rows.hand_out(numbers)
    return numbers[rows.append(numbers, np.array([*tokens.values()], dtype=np.int32))].tolist()


def test_output_of_any_length_comes_back_with_the_request():
    rows, one = RunningRows(3), request("a")
    rows.enter(one, 2)
    rows.enter(request("b"), 0)
    for i in range(300):
        append(rows, {2: i, 0: 7})
    rows.leave(2)
    assert one.known_token_ids().tolist() == [1, 2, 3, *range(300)]
    rows.enter(request("c"), 2)
    rows.enter(one, 1)
    assert rows.num_tokens.tolist() == [303, 303, 3]
    assert (rows.num_tokens_at_entry[1], rows.num_output[1]) == (303, 300)
    append(rows, {1: 300})
    rows.leave(1)
    assert one.output_token_ids.tolist() == [*range(301)]


def test_a_resumed_request_may_have_more_output_than_any_row_had_room_for():
    long, rows = request("a"), RunningRows(1)
    long.output_token_ids = np.arange(1000, dtype=np.int32)
    rows.enter(long, 0)
    append(rows, {0: 5})
    rows.leave(0)
    assert long.output_token_ids.tolist() == [*range(1000), 5]


def test_only_who_may_have_ended_is_named():
    rows = RunningRows(4)
    for row, one in enumerate([request("a", eos=[9, -1]), request("b", stop=[4]), request("c", max_tokens=2)]):
        rows.enter(one, row)
    assert append(rows, {0: 5, 1: 8, 2: 100_000}) == []
    assert append(rows, {0: 9, 1: 5, 2: 5}) == [0, 2]
    assert append(rows, {0: 5, 1: 4}) == [1]
    rows.leave(1)
    assert append(rows, {0: 4}) == []
    assert append(rows, {}) == []


def test_the_last_token_is_told_apart_by_the_request():
    one = request("a", max_tokens=3, eos=[9], stop=[4])
    assert one.finish_reason(4, 1) == ("stop", 4)
    assert one.finish_reason(9, 1) == ("stop", None)
    assert one.finish_reason(5, 2) is None
    assert one.finish_reason(5, 3) == ("length", None)
