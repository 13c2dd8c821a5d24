"""A request that runs alone reaches the plan's max_model_len, whatever the plan, the chunks and what is cached.

Only if it starts from cached pages may they lie so scattered that it has to start once more without them.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_driver import KVDriver, make_config

from girih.errors import CapacityError
from girih.kv import FullAttentionSpec, SlidingWindowSpec, get_kv_cache_configs
from girih.kv.capacity import request_fits
from girih.kv.specs.full_attention import FullAttentionRetention
from girih.kv.specs.sliding_window import SlidingWindowRetention

full = st.builds(
    FullAttentionSpec, st.sampled_from([1, 2, 5]), st.just(8), st.just("int8"), block_size_multiple=st.just(1)
)
sliding = st.builds(
    SlidingWindowSpec, st.sampled_from([1, 3]), st.just(8), st.just("int8"),
    st.sampled_from([1, 2, 3, 7, 8, 9, 16, 23, 40]), block_size_multiple=st.just(1),
)  # fmt: skip
layers = st.lists(st.one_of(full, sliding), min_size=1, max_size=6)


def tightest_plan(specs, max_model_len, block_size):
    """Return the plan in the least memory that start-up accepts."""
    options = {"max_model_len": max_model_len, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    options["block_size"] = block_size
    with pytest.raises(CapacityError) as refusal:
        get_kv_cache_configs([specs], [1], **options)
    return get_kv_cache_configs([specs], [refusal.value.need_bytes], **options)[0]


def run_to_the_end(driver, tokens, num_new, chunks):
    """Run one request alone, with these chunk sizes over and over; `KVDriver.step` tells if it cannot go on.

    Where cached pages left it scattered it starts again in an empty pool, as the scheduler's solo requests do.
    """
    row = driver.add(tokens)
    step = 0
    while len(driver.rows[row]) < len(tokens) + num_new:
        for known in driver.step(chunks[step % len(chunks)]):
            assert driver.manager.reset_prefix_cache()
            row = driver.add(known, num_prompt=len(tokens), read_cache=False)
        step += 1
    driver.free(row)
    driver.manager.check()


def check_lone_runs(config, prompts, chunks):
    assert request_fits(config, config.max_model_len)
    driver = KVDriver(config, check=False)
    for first, wanted in prompts:
        length = min(wanted, config.max_model_len - 1)
        run_to_the_end(driver, range(first, first + length), config.max_model_len - length, chunks)


chunks = st.lists(st.sampled_from([1, 3, 4, 5, 16, 33, 1000]), min_size=1, max_size=4)
prompts = st.lists(st.tuples(st.sampled_from([0, 0, 500]), st.integers(1, 140)), min_size=1, max_size=3)
short = settings(deadline=None, max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
long = settings(deadline=None, max_examples=2000, suppress_health_check=list(HealthCheck))


def plan_and_run(layers, max_model_len, block_size, prompts, chunks):
    specs = {f"layer.{i}": spec for i, spec in enumerate(layers)}
    check_lone_runs(tightest_plan(specs, max_model_len, block_size), prompts, chunks)


def slabs_and_run(groups, max_model_len, block_size, prompts, chunks):
    lone = sum(-(-kept.peak_blocks(max_model_len, block_size) // k) for kept, k in groups)
    check_lone_runs(make_config(lone, groups, max_model_len, block_size), prompts, chunks)


planned = given(layers, st.integers(8, 150), st.sampled_from([1, 3, 4]), prompts, chunks)
by_hand = given(  # also slabs and pages that the planner would not choose
    st.lists(
        st.tuples(
            st.one_of(
                st.just(FullAttentionRetention()),
                st.builds(SlidingWindowRetention, st.sampled_from([1, 2, 3, 7, 8, 9, 16, 23, 40])),
            ),
            st.integers(1, 9),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(8, 150),
    st.sampled_from([1, 3, 4]),
    prompts,
    chunks,
)

test_the_tightest_plan_serves_its_longest_request = short(planned(plan_and_run))
test_any_slabs_that_hold_the_peak_serve_the_longest_request = short(by_hand(slabs_and_run))
test_the_tightest_plan_serves_its_longest_request_many_times = pytest.mark.soak(long(planned(plan_and_run)))
test_any_slabs_that_hold_the_peak_serve_the_longest_request_many_times = pytest.mark.soak(long(by_hand(slabs_and_run)))


def test_a_request_that_cached_pages_leave_without_a_slab_is_served_in_an_empty_pool():
    groups = [(FullAttentionRetention(), 4), (SlidingWindowRetention(1), 5), (SlidingWindowRetention(23), 6)]
    slabs_and_run(groups, 86, 1, prompts=[(0, 4), (0, 75)], chunks=[3, 16])


def test_a_short_prompt_is_not_cut_to_blocks_because_the_pool_is_tight():
    # the pool is one longest request; the prompt's pages in windows are gone long before the pool is needed
    groups = [(FullAttentionRetention(), 4), (SlidingWindowRetention(16), 2)]
    lone = sum(-(-kept.peak_blocks(2048, 4) // k) for kept, k in groups)
    driver = KVDriver(make_config(lone, groups, max_model_len=2048))
    row = driver.add(range(200))
    assert driver.manager.max_new_tokens(row, 200) == 200


def test_near_the_end_of_a_tight_pool_chunks_shrink_to_a_block_and_no_further():
    groups = [(FullAttentionRetention(), 4), (SlidingWindowRetention(16), 2)]
    lone = sum(-(-kept.peak_blocks(256, 4) // k) for kept, k in groups)
    driver = KVDriver(make_config(lone, groups, max_model_len=256))
    row = driver.add(range(255))
    sizes = []
    while len(driver.rows[row]) == 255:
        before = int(driver.manager.num_computed_tokens[row])
        driver.step(64)
        sizes.append(int(driver.manager.num_computed_tokens[row]) - before)
    assert sizes[0] == 64
    assert min(sizes[:-1]) >= 4


def test_a_hit_scattered_over_the_slabs_of_another_group_is_computed_again():
    # 2 slabs of 2 pages for the full group's 4 blocks, 1 slab for the window
    config = make_config(3, [(FullAttentionRetention(), 2), (SlidingWindowRetention(4), 2)], max_model_len=16)
    driver = KVDriver(config)
    for start in (0, 100, 200):
        driver.run(range(start, start + 15))
    for start in (0, 100, 200):
        row = driver.add([*range(start, start + 15)])
        assert row is not None
        while len(driver.rows[row]) < 16:
            assert not driver.step(4)
        driver.free(row)
    assert np.all(driver.manager.num_computed_tokens == 0)
