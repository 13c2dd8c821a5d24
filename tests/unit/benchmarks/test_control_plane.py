"""The adapter runs operations as the engine would: hits, refusals that can be tried again, and exact accounts."""

import numpy as np
import pytest
from control_plane import make_adapter
from control_runs import Comparison, Mark, Measured, Workload, marks_of
from control_workloads import KINDS
from op_streams import ADMIT, FREE, PREFILL, STEP, TICK, lockstep_decode, shared_prefixes

from girih.kv import FullAttentionSpec, SlidingWindowSpec

FULL = {f"layer.{i}": FullAttentionSpec(1, 64, "bfloat16") for i in range(2)}
TOKEN_BYTES = 512
MIXED = {"layer.0": FULL["layer.0"], "layer.1": SlidingWindowSpec(1, 64, "bfloat16", 64)}


def adapter(num_blocks, specs=FULL, max_model_len=512, max_num_seqs=8, **options):
    pool_bytes = num_blocks * 16 * TOKEN_BYTES
    return make_adapter(specs, pool_bytes, max_model_len=max_model_len, max_num_seqs=max_num_seqs, **options)


def prompt(length, start=0):
    return [(start + i) % 50_000 for i in range(length)]


def test_the_pool_has_the_bytes_that_were_given():
    cache = adapter(40)
    assert cache.capacity_bytes() == 40 * 16 * TOKEN_BYTES
    assert adapter(40, MIXED).capacity_bytes() <= 40 * 16 * TOKEN_BYTES


def test_a_repeated_prompt_hits_all_but_its_last_block():
    cache = adapter(40)
    cache.tick()
    assert cache.admit(0, prompt(100)) == 0
    assert cache.prefill(0, 100)
    cache.tick()
    assert cache.step(0, 7)
    cache.free(0)
    assert cache.admit(1, np.array(prompt(100), dtype=np.int32)) in range(96, 100)
    cache.check()


def test_nothing_is_found_without_prefix_caching():
    cache = adapter(40, enable_prefix_caching=False)
    for rid in (0, 1):
        cache.tick()
        assert cache.admit(rid, prompt(100)) == 0
        assert cache.prefill(rid, 100)


def test_pages_and_bytes_held_follow_a_request():
    cache = adapter(40)
    assert cache.bytes_held() == 0
    cache.tick()
    cache.admit(0, prompt(30))
    assert cache.prefill(0, 20)
    assert cache.pages_held() == {0: 2}
    cache.tick()
    assert cache.prefill(0, 20)
    assert cache.prefill(0, 20), "nothing is left to compute, which is no refusal"
    for step in range(3):
        cache.tick()
        assert cache.step(0, step)
    assert cache.pages_held() == {0: 3}
    assert cache.bytes_held() == 3 * 16 * TOKEN_BYTES
    cache.free(0)
    assert cache.bytes_held() == 0
    cache.check()


def test_a_prompt_in_chunks_is_cached_like_one_in_one_piece():
    cache = adapter(40)
    cache.admit(0, prompt(200))
    for _ in range(5):
        cache.tick()
        assert cache.prefill(0, 41)
    assert cache.pages_held() == {0: 13}
    cache.tick()
    assert cache.step(0, 1)
    cache.free(0)
    assert cache.admit(1, prompt(200)) >= 192


def test_a_request_that_does_not_fit_waits_and_fits_later():
    cache = adapter(10, max_model_len=160)
    cache.tick()
    cache.admit(0, prompt(100))
    assert cache.prefill(0, 100)
    cache.admit(1, prompt(100, start=9_000))
    assert not cache.prefill(1, 100)
    assert cache.pages_held() == {0: 7}
    cache.free(0)
    assert cache.prefill(1, 100)
    cache.free(1)
    cache.check()


def test_a_request_that_never_ran_can_be_freed():
    cache = adapter(10, max_model_len=160)
    cache.admit(0, prompt(100))
    cache.admit(1, prompt(100, start=9_000))
    cache.free(1)
    cache.free(0)
    assert cache.bytes_held() == 0


def test_a_refused_step_is_tried_again_with_the_token_it_has():
    cache = adapter(4, max_model_len=64)
    cache.tick()
    for rid in (0, 1):
        cache.admit(rid, prompt(31, start=rid * 9_000))
        assert cache.prefill(rid, 31)
    for step in range(1):
        cache.tick()
        assert cache.step_batch([0, 1], [step, step]).all()
    cache.tick()
    assert not cache.step_batch([0, 1], [5, 5]).any()
    assert not cache.step(1, 5)
    cache.free(0)
    cache.tick()
    assert cache.step(1, 5)
    cache.check()
    assert cache.manager.num_computed_tokens.max() == 32


def test_those_behind_a_refused_request_are_served():
    cache = adapter(4, max_model_len=64)
    cache.tick()
    for rid, length in ((0, 32), (1, 20)):
        cache.admit(rid, prompt(length, start=rid * 9_000))
        assert cache.prefill(rid, length)
    cache.tick()
    assert cache.step_batch(np.array([0, 1]), np.array([1, 1])).tolist() == [False, True]


def test_request_ids_may_be_any_small_number():
    cache = adapter(40)
    cache.admit(70_000, prompt(20))
    assert cache.prefill(70_000, 20)
    cache.free(70_000)


@pytest.mark.parametrize("specs", [FULL, MIXED], ids=["full", "mixed"])
def test_the_adapter_runs_whole_streams_without_a_leak(specs):
    for stream in (
        lockstep_decode(4, prompt_tokens=70, decode_steps=20),
        shared_prefixes(16, 3, prefix_tokens=96, suffix_tokens=20, decode_steps=6, pool_tokens=768),
    ):
        cache = make_adapter(
            specs,
            stream.pool_tokens * TOKEN_BYTES,
            max_model_len=stream.max_model_len,
            max_num_seqs=stream.max_num_seqs,
        )
        operations = {ADMIT: cache.admit, PREFILL: cache.prefill, STEP: cache.step, FREE: cache.free, TICK: cache.tick}
        for op in stream.ops:
            answer = operations[op[0]](*op[1:])
            assert answer is not False
            cache.check()
        assert cache.bytes_held() == 0


@pytest.mark.parametrize("name", ["W3", "sched"])
def test_a_workload_is_measured(name):
    entry = Comparison(reps=1, quick=True, clock="wall", vllm=None).run(name)
    assert entry["girih"]["us_per_row_step"] > 0
    assert ("hit_tokens" in entry["girih"]) == (name == "W3")


def test_every_workload_has_a_model():
    for name in KINDS:
        if not name.startswith("sched"):
            assert Workload(name, quick=True).token_bytes > 0


def test_marks_compare_as_they_should():
    ours = {name: Measured(name, [[1_000]], hit_tokens=9) for name in ("W1", "W2", "W3")}
    ours["W2"].segments = [[2_001]]
    theirs = {name: Measured(name, [[70_000]], hit_tokens=10) for name in ("W1", "W3")}
    verdicts = {mark.what: mark.missed for mark in marks_of(ours, theirs)}
    assert verdicts == {
        "W1: times faster than vLLM": False,
        "W3: times faster than vLLM": False,
        "W2: times own W1": True,
        "W3: hit tokens, at least vLLM's": True,
    }
    assert Mark("", 2, 2, at_least=True).missed is Mark("", 2, 2, at_least=False).missed is False
