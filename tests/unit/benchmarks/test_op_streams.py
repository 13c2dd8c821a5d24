"""The workloads are the same operations and tokens everywhere, in every version."""

import numpy as np
import pytest
from op_streams import ADMIT, FREE, PREFILL, QUICK_STREAMS, STEP, STEP_BATCH, STREAMS, TICK, batch_steps
from timing import Nothing, loop_seconds, quiet_seconds, timed_run

DIGESTS = {
    "W1": "5261b67f9f03df7b",
    "W2": "5261b67f9f03df7b",
    "W2L": "16b4c94e761416ea",
    "W3": "9e12de39e18a86f6",
    "W4": "02a701d33c9d4df0",
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_never_changes(name):
    assert STREAMS[name]().digest() == DIGESTS[name]


def test_the_digest_covers_every_token():
    stream = QUICK_STREAMS["W3"]()
    before = stream.digest()
    admit = next(op for op in stream.ops if op[0] == ADMIT)
    admit[2][-1] ^= 1
    assert stream.digest() != before


@pytest.mark.parametrize("name", QUICK_STREAMS)
def test_no_more_requests_are_held_at_once_than_the_stream_says(name):
    stream = QUICK_STREAMS[name]()
    held, most = set(), 0
    for op in stream.ops:
        if op[0] == ADMIT:
            assert op[1] not in held
            held.add(op[1])
            most = max(most, len(held))
        elif op[0] == FREE:
            held.remove(op[1])
        elif op[0] in (PREFILL, STEP):
            assert op[1] in held
    assert not held
    assert most <= stream.max_num_seqs


def test_runs_of_steps_become_batches_and_nothing_else_changes():
    ops = [(TICK,), (STEP, 3, 7), (STEP, 1, 8), (FREE, 3), (STEP, 1, 9), (TICK,), (TICK,), (STEP, 1, 5)]
    merged = batch_steps(ops)
    assert [op[0] for op in merged] == [TICK, STEP_BATCH, FREE, STEP_BATCH, TICK, TICK, STEP_BATCH]
    assert [(op[1].tolist(), op[2].tolist()) for op in merged if op[0] == STEP_BATCH] == [
        ([3, 1], [7, 8]),
        ([1], [9]),
        ([1], [5]),
    ]
    assert merged[1][2].dtype == np.int32


class Counting(Nothing):
    def __init__(self):
        self.calls = []

    def admit(self, rid, tokens):
        self.calls.append(("admit", rid, len(tokens)))
        return 5

    def step_batch(self, rids, toks):
        self.calls.append(("step", *rids))


def test_a_timed_run_does_every_operation_in_order_and_adds_up_the_hits():
    adapter = Counting()
    ops = [(ADMIT, 0, [1, 2]), (PREFILL, 0, 2), *batch_steps([(STEP, 0, 1)]), (ADMIT, 1, [1]), (FREE, 0), (TICK,)]
    segments, hits = timed_run(adapter, ops)
    assert adapter.calls == [("admit", 0, 2), ("step", 0), ("admit", 1, 1)]
    assert hits == 10
    assert len(segments) == len(ops)
    assert all(time > 0 for time in segments)


def test_the_quiet_time_takes_each_segment_from_its_best_run():
    assert quiet_seconds([[10, 500], [400, 20]]) == 30e-9


def test_the_loop_itself_costs_little():
    ops = QUICK_STREAMS["W3"]().ops
    assert 0 < loop_seconds(ops) < 1e-5 * len(ops)
