"""The benchmark of executors: a real core over a worker that waits, a padded scheduler, rounds in turns, marks."""

import time

import pytest
from engine_pairs import engine_pair, paired_seconds
from executors import Figure, Scale, run
from tiny_models import tiny_llama
from waiting_engine import PaddedScheduler, waiting_engine

import girih.executor


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("executor", ["uniproc", "multiproc"])
def test_all_requests_decode_in_every_step_over_a_worker_that_waits(executor, is_async):
    options = {"num_requests": 5, "num_steps": 8, "step_ms": 1, "scheduler_ms": 0.1, "is_async": is_async}
    with waiting_engine(executor, **options) as engine:
        found = engine.measure(4, warm_up=2)  # which asserts it
        assert engine.core.stats().num_running == 5
    assert found["worker_ms"] >= 1
    assert len(girih.executor.__path__) == 1


def test_a_padded_scheduler_is_the_scheduler_but_slower():
    class Steps:
        num_micro_batches = 1

        def schedule(self):
            return "step"

    padded = PaddedScheduler(Steps(), step_s=0.01)
    start = time.perf_counter()
    assert padded.schedule() == "step"
    assert time.perf_counter() - start >= 0.005
    assert padded.num_micro_batches == 1


def test_a_pair_generates_in_turns(tmp_path):
    with engine_pair(str(tiny_llama(tmp_path)), {}, {"async_scheduling": False}) as pair:
        seconds = paired_seconds(pair, num_sequences=2, num_output_tokens=3, rounds=2)
        assert [llm.config.async_scheduling for llm in pair] == [True, False]
        assert [llm.stats().num_steps for llm in pair] == [9, 9]
    assert len(seconds) == 2
    assert all(first > 0 and second > 0 for first, second in seconds)


@pytest.mark.parametrize(
    ("values", "marks", "missed"),
    [
        ([0.5, 0.9, 2.0], {"at_least": 0.9}, False),
        ([0.8, 0.89, 2.0], {"at_least": 0.9}, True),
        ([10.5, 10.6, 99.0], {"at_most": 10.6}, False),
        ([1.0, 10.7, 10.8], {"at_most": 10.6}, True),
        ([1.0], {}, False),
    ],
)
def test_the_median_is_judged(values, marks, missed):
    figure = Figure("async", "x", values, "ratio", **marks)
    assert figure.missed == missed
    assert ("missed" in figure.line()) == missed


def test_a_short_run_answers_without_marks():
    figures = run(["scheduler"], Scale(rounds=1, steps=2, has_marks=False), as_text=False)
    assert [figure.case for figure in figures] == [
        f"256 requests, {executor}, {mode}" for executor in ("uniproc", "multiproc") for mode in ("async", "sync")
    ]
    assert not any(figure.missed for figure in figures)
