"""The bill for the KV cache: own-process accounting, clamped terms, and errors that name rank and terms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from girih.config import EngineConfig
from girih.errors import CapacityError
from girih.kv.plan import get_kv_cache_configs
from girih.kv.specs.full_attention import FullAttentionSpec
from girih.units import GIB
from girih.worker.memory import MemoryProfile, memory_report


def profile(*, total=32.0, free=32.0, weights=4.0, process=4.0, peak=4.0):
    return MemoryProfile(*(int(value * GIB) for value in (total, free, weights, process, peak)))


def available(profile, utilization=0.5, rank=0):
    return memory_report(profile, utilization=utilization, rank=rank).available_bytes / GIB


def test_what_a_neighbour_takes_meanwhile_is_not_on_our_bill():
    """Case 1: own 4 GiB, a peer takes 3 before the second look (25 free): 11.2 - 4 = 7.2, never 4.2."""
    assert available(profile(free=25), 0.35) == pytest.approx(7.2)


@pytest.mark.parametrize("free", [28, 31, 32, 40])
def test_what_a_neighbour_gives_back_meanwhile_is_neither_an_error_nor_extra_room(free):
    """Case 2."""
    assert available(profile(free=free), 0.35) == pytest.approx(7.2)


def test_a_negative_measurement_counts_as_zero_with_a_warning():
    """Case 3: weights 10, activations 1, budget 20 and a term of -20 leave 9, never 29."""
    report = memory_report(profile(total=40, free=40, weights=10, process=-10, peak=-9), utilization=0.5, rank=2)
    assert report.available_bytes == 9 * GIB
    assert report.overhead_bytes == 0
    (warning,) = report.warnings
    assert "worker 2: process measured as -20.00 GiB; taken as 0" in warning


LAYERS = {f"layers.{i}": FullAttentionSpec(8, 128, "bfloat16", block_size_multiple=1) for i in range(28)}


def plan(total_gib, max_model_len):
    """Plan as the engine does without any option for memory; 4.38 GiB are needed for 40,960 tokens."""
    measured = profile(total=total_gib, free=total_gib, weights=0.3, process=0.5, peak=0.6)
    report = memory_report(measured, utilization=EngineConfig.memory_utilization, rank=0)
    return get_kv_cache_configs([LAYERS], [report.available_bytes], max_model_len=max_model_len, model_limit=40_960)[0]


def test_the_default_comes_from_the_memory_that_there_is():
    """Case 12: 185 GiB serve the model's own limit, 2 GiB say what would fit."""
    assert plan(185, "auto").max_model_len == plan(185, 40_960).max_model_len == 40_960
    assert plan(185, "auto").pool_bytes > 80 * GIB
    with pytest.raises(CapacityError) as error:
        plan(2, 40_960)
    assert error.value.need_bytes > 4.37 * GIB
    assert 0.3 * GIB < error.value.have_bytes < 0.5 * GIB
    fitting = error.value.fitting_tokens
    assert str(fitting) in str(error.value)
    assert plan(2, fitting).max_model_len == fitting > 3000


def test_never_more_than_is_really_free():
    assert available(profile(total=100, free=6, peak=5), 0.9) == pytest.approx(5)


@given(st.lists(st.integers(-(2**45), 2**45), min_size=5, max_size=5), st.floats(0.01, 1))
def test_the_cache_never_exceeds_budget_minus_weights_minus_activations(values, utilization):
    measured = MemoryProfile(*values)
    report = memory_report(measured, utilization=utilization, rank=0)
    terms = (report.weights_bytes, report.overhead_bytes, report.activations_bytes)
    assert min(terms) >= 0
    activations = max(0, measured.peak_process_bytes - measured.process_bytes)
    assert report.available_bytes <= report.budget_bytes - max(0, measured.weights_bytes) - activations
    assert report.available_bytes <= measured.free_bytes


def test_the_error_names_the_rank_its_own_terms_and_the_options():
    """Case 5: rank 0 has 9.90 GiB, rank 1 -3.86 GiB; only rank 1 is in the message."""
    memory_report(profile(total=40, weights=10, process=10, peak=10.1), utilization=0.5, rank=0).check()
    report = memory_report(profile(total=40, weights=22, process=22.86, peak=23.86), utilization=0.5, rank=1)
    with pytest.raises(CapacityError) as error:
        report.check()
    for part in (
        "worker 1 ", "budget 20.00 GiB (0.5 of 40.00 GiB)", "weights 22.00 GiB", "process 880.64 MiB",
        "activations 1.00 GiB", "-3.86 GiB", "--memory-utilization", "--kv-cache-memory",
    ):  # fmt: skip
        assert part in str(error.value)
    assert error.value.need_bytes > error.value.have_bytes == 20 * GIB
