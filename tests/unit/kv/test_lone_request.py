"""What fits is exact: a lone request reaches the plan's max_model_len, and whoever is admitted gets its pages.

Whatever the plan, the chunks, what is cached, and how scattered earlier requests left it.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from kv_driver import KVDriver, make_config

from girih.errors import CapacityError
from girih.kv import FullAttentionSpec, SlidingWindowSpec, StateSpec, get_kv_cache_configs
from girih.kv.capacity import request_fits
from girih.kv.specs.chunked_local import ChunkedLocalRetention
from girih.kv.specs.full_attention import FullAttentionRetention
from girih.kv.specs.sliding_window import SlidingWindowRetention
from girih.kv.specs.state import StateRetention

full = st.builds(
    FullAttentionSpec, st.sampled_from([1, 2, 5]), st.just(8), st.just("int8"), block_size_multiple=st.just(1)
)
sliding = st.builds(
    SlidingWindowSpec, st.sampled_from([1, 3]), st.just(8), st.just("int8"),
    st.sampled_from([1, 2, 3, 7, 8, 9, 16, 23, 40]), block_size_multiple=st.just(1),
)  # fmt: skip
recurrent = st.builds(StateSpec, st.sampled_from([((40,),), ((7, 9),)]), st.just(("int8",)))
layers = st.lists(st.one_of(full, sliding, recurrent), min_size=1, max_size=6)
retentions = st.one_of(
    st.just(FullAttentionRetention()),
    st.builds(SlidingWindowRetention, st.sampled_from([1, 2, 3, 7, 8, 9, 16, 23, 40])),
    st.builds(ChunkedLocalRetention, st.sampled_from([5, 8, 24])),
    st.just(StateRetention()),
)
# pages per slab, and the block size in units
groups = st.lists(st.tuples(retentions, st.integers(1, 9), st.sampled_from([1, 1, 2, 3])), min_size=1, max_size=4)
chunks = st.lists(st.sampled_from([1, 3, 4, 5, 16, 33, 1000]), min_size=1, max_size=4)
prompts = st.lists(st.tuples(st.sampled_from([0, 0, 500]), st.integers(1, 140)), min_size=1, max_size=3)
quiet = {"deadline": None, "suppress_health_check": list(HealthCheck)}
short = settings(max_examples=40, derandomize=True, phases=[Phase.explicit, Phase.generate], **quiet)
long = settings(max_examples=2000, **quiet)


def tightest_plan(specs, max_model_len, block_size, lookahead):
    """Return the plan in the least memory that start-up accepts."""
    options = {"max_model_len": max_model_len, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    options |= {"block_size": block_size, "num_lookahead_tokens": lookahead}
    with pytest.raises(CapacityError) as refusal:
        get_kv_cache_configs([specs], [1], **options)
    return get_kv_cache_configs([specs], [refusal.value.need_bytes], **options)[0]


def scatter(driver, requests, chunks):
    """Leave the pool as requests leave it that run side by side and end in any order, each after its own steps."""
    longest, ends = driver.config.max_model_len, {}
    for number, (first, wanted) in enumerate(requests):
        row = driver.add(range(first, first + min(wanted, longest - 1)))
        if row is not None:
            ends[row] = 1 + (5 * number + wanted) % 7
    step = 0
    while driver.rows:
        driver.step(chunks[step % len(chunks)], sample=lambda row: row)
        step += 1
        for row in list(driver.rows):
            if step >= ends[row] or len(driver.rows[row]) == longest:
                driver.free(row)


def run_to_the_end(driver, tokens, num_new, chunks):
    """Run one request alone, with these chunk sizes over and over; `KVDriver.step` tells if it cannot go on."""
    row = driver.add(tokens)
    assert row is not None
    step = 0
    while len(driver.rows[row]) < len(tokens) + num_new:
        assert not driver.step(chunks[step % len(chunks)])
        step += 1
    driver.free(row)
    driver.manager.check()


def check_lone_runs(config, requests, prompts, chunks):
    assert request_fits(config, config.max_model_len)
    driver = KVDriver(config, check=False, state_checkpoint_tokens=8)
    scatter(driver, requests, chunks)
    for first, wanted in prompts:
        length = min(wanted, config.max_model_len - 1)
        run_to_the_end(driver, range(first, first + length), config.max_model_len - length, chunks)


def plan_and_run(layers, max_model_len, block_size, lookahead, requests, prompts, chunks):
    specs = {f"layer.{i}": spec for i, spec in enumerate(layers)}
    check_lone_runs(tightest_plan(specs, max_model_len, block_size, lookahead), requests, prompts, chunks)


def hand_made(groups, max_model_len, unit, lookahead, spare=0):
    """Return a plan of so many slabs more than one request needs: also what the planner would not choose."""
    groups = [(kept, k, unit * blocks) for kept, k, blocks in groups]
    lone = sum(-(-kept.peak_blocks(max_model_len, size, lookahead) // k) for kept, k, size in groups)
    return make_config(lone + spare, groups, max_model_len, num_lookahead_tokens=lookahead)


def slabs_and_run(groups, max_model_len, unit, lookahead, requests, prompts, chunks):
    check_lone_runs(hand_made(groups, max_model_len, unit, lookahead), requests, prompts, chunks)


lookaheads = st.sampled_from([0, 0, 3])
planned = given(layers, st.integers(8, 150), st.sampled_from([1, 3, 4]), lookaheads, prompts, prompts, chunks)
by_hand = given(groups, st.integers(8, 150), st.sampled_from([1, 3, 4]), lookaheads, prompts, prompts, chunks)

test_the_tightest_plan_serves_its_longest_request = short(planned(plan_and_run))  # cases 8 and 79
test_any_slabs_that_hold_the_peak_serve_the_longest_request = short(by_hand(slabs_and_run))
test_the_tightest_plan_serves_its_longest_request_many_times = pytest.mark.soak(long(planned(plan_and_run)))
test_any_slabs_that_hold_the_peak_serve_the_longest_request_many_times = pytest.mark.soak(long(by_hand(slabs_and_run)))


def admit_beside_others(groups, max_model_len, spare, running, prompt, chunk):
    config = hand_made(groups, max_model_len, unit=4, lookahead=0, spare=spare)
    driver = KVDriver(config, check=False, state_checkpoint_tokens=8)
    for first, wanted in running:
        driver.add(range(first, first + min(wanted, max_model_len - 4)))
        driver.step(chunk)
    first, wanted = prompt
    tokens = list(range(first, first + min(wanted, max_model_len - 1)))
    held, manager = driver.manager.stats().referenced_pages, driver.manager
    peak = [group.retention.peak_blocks(len(tokens) + 1, group.block_size, 0) for group in config.groups]
    most = sum(-(-(a + b) // group.pages_per_slab) for a, b, group in zip(held, peak, config.groups, strict=True))
    hit = manager.lookup(np.array(tokens))
    row = driver.add(tokens)
    if row is None:
        assert most > config.num_slabs, "refused, though it fits beside the others without sharing anything"
        return
    if not hit:
        assert most <= config.num_slabs, "admitted, though it does not fit"
    while len(driver.rows[row]) == len(tokens):  # the others pause
        count = manager.max_new_tokens(row, min(chunk, len(tokens) - int(manager.num_computed_tokens[row])))
        assert count > 0, "admitted, and stuck"
        assert driver.reserve([row], [count]) == 1
        manager.publish(np.array([row]), np.array([manager.num_computed_tokens[row] + count]))
        driver.compute(np.array([row]), np.array([count]))
    manager.check()


admissions = given(
    groups, st.integers(16, 90), st.integers(0, 9),
    st.lists(st.tuples(st.sampled_from([0, 0, 500]), st.integers(1, 60)), max_size=3),
    st.tuples(st.sampled_from([0, 0, 500]), st.integers(1, 90)), st.sampled_from([1, 5, 16, 1000]),
)  # fmt: skip
test_admission_is_exact = short(admissions(admit_beside_others))  # cases 77 and 79
test_admission_is_exact_many_times = pytest.mark.soak(long(admissions(admit_beside_others)))


def test_a_lone_request_whose_prefix_ends_in_its_last_block_needs_no_page_more_than_it_has():
    # behind token 14 its last block would be copied, and there is no page to copy to
    driver = KVDriver(make_config(4, [(FullAttentionRetention(), 1)], max_model_len=16))
    driver.run(range(12), num_new=3)
    tokens = np.array([*range(12), 0, 0, 5])
    assert driver.manager.lookup(tokens) == 14
    assert driver.run(tokens.tolist()) == 0


def test_a_prefix_that_is_cached_costs_no_page_more_than_computing_it():
    # 7 blocks and 3 of the window, and not one page to spare
    groups = [(FullAttentionRetention(), 1), (SlidingWindowRetention(8), 1)]
    driver = KVDriver(make_config(10, groups, max_model_len=28))
    driver.run(range(13), num_new=1)
    assert driver.run(range(13), num_new=15) == 12


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


def test_a_prefix_scattered_over_all_slabs_is_gathered():
    # 2 slabs of 2 pages for the full group's 4 blocks, 1 slab for the window
    config = make_config(3, [(FullAttentionRetention(), 2), (SlidingWindowRetention(4), 2)], max_model_len=16)
    driver = KVDriver(config)
    for start in (0, 100, 200) * 2:
        row = driver.add(range(start, start + 15))
        assert row is not None
        while len(driver.rows[row]) < 16:
            assert not driver.step(4)
        driver.free(row)
    assert np.all(driver.manager.num_computed_tokens == 0)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("max_model_len", [1000, 1009])
@pytest.mark.parametrize("lookahead", [0, 3])
def test_what_start_up_accepts_completes(block_size, max_model_len, lookahead):  # case 8
    config = tightest_plan(
        {"full": FullAttentionSpec(1, 8, "int8"), "window": SlidingWindowSpec(1, 8, "int8", 100)},
        max_model_len, block_size, lookahead,
    )  # fmt: skip
    driver = KVDriver(config, check=False)
    run_to_the_end(driver, range(990), max_model_len - 990, [100])
    assert driver.manager.max_request_tokens == max_model_len
