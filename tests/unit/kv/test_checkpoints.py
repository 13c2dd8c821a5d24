"""Recurrent states: where checkpoints are left, who starts from them, and that none of it costs anybody room."""

import numpy as np
import pytest
from kv_driver import KVDriver, evict_page, listed_pages, make_config

from girih.kv.specs.full_attention import FullAttentionRetention
from girih.kv.specs.sliding_window import SlidingWindowRetention
from girih.kv.specs.state import StateRetention

FULL, STATE = FullAttentionRetention(), StateRetention()


def hybrid_driver(num_slabs=40, groups=((FULL, 1), (STATE, 1)), max_model_len=96, **options):
    return KVDriver(make_config(num_slabs, groups, max_model_len), **options)


def lookup(driver, tokens):
    return driver.manager.lookup(np.array(tokens))


def checkpoints(driver, tokens, group=1):
    """Return behind how many tokens of a prompt there is a state."""
    pages = listed_pages(driver.manager, tokens)[:, group]
    return ((np.flatnonzero(pages) + 1) * driver.manager.unit).tolist()


def step_states(driver, rows, counts, group=1):
    """Do a step and return its `StateStep`."""
    rows, counts = np.array(rows), np.array(counts)
    assert driver.reserve(rows, counts) == len(rows)
    driver.manager.publish(rows, driver.manager.num_computed_tokens[rows] + counts)
    seen, take = [], driver.manager.take_cache_update
    driver.manager.take_cache_update = lambda *args: seen.append(take(*args)) or seen[0]
    driver.compute(rows, counts)
    driver.manager.take_cache_update = take
    return seen[0].states[group]


# --- where


@pytest.mark.parametrize("length", [9, 20, 21, 22, 23, 24])
@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
def test_a_prompt_leaves_a_checkpoint_behind_its_last_unit(length, chunk):
    driver = hybrid_driver()
    driver.run(range(length), num_new=3, chunk=chunk)
    boundary = (length - 1) // 4 * 4
    assert boundary in checkpoints(driver, range(length))
    assert driver.run(range(length), chunk=chunk) == boundary
    assert driver.run([*range(length), 7, 8], chunk=chunk) >= length


def test_a_prompt_within_its_first_unit_leaves_none():
    driver = hybrid_driver()
    driver.run(range(4), num_new=3)
    assert driver.manager.stats().checkpoints == 0


def test_a_checkpoint_is_left_where_a_prompt_left_what_was_known():
    driver = hybrid_driver()
    driver.run([*range(20), *range(100, 110)])
    assert driver.run([*range(20), *range(200, 210)]) == 0
    assert checkpoints(driver, range(20)) == [20]
    assert driver.run([*range(20), *range(300, 310)]) == 20
    # the branch is known now: no other one is left there
    assert driver.manager.stats().checkpoints == 1 + 2 + 1


def test_checkpoints_are_left_every_so_many_tokens():
    driver = hybrid_driver(state_checkpoint_tokens=7)  # two units
    driver.run(range(45), num_new=30, chunk=16)
    assert checkpoints(driver, range(45)) == [8, 16, 24, 32, 40, 44]
    assert [lookup(driver, [*range(n), 99]) for n in (7, 8, 31, 40, 45)] == [0, 8, 24, 40, 44]


def test_a_decoding_request_leaves_a_checkpoint_where_it_ends_only():
    driver = hybrid_driver(state_checkpoint_tokens=8)
    row = driver.add(range(10))
    while len(driver.rows[row]) < 40:
        driver.step()
    tokens = driver.rows[row]
    driver.free(row)
    assert checkpoints(driver, tokens) == [8]
    assert [lookup(driver, [*tokens[:n], 99]) for n in (39, 38, 20)] == [39, 8, 8]
    # preempted, it is a prompt again
    row = driver.add(tokens, num_prompt=10, read_cache=False)
    driver.step()
    assert checkpoints(driver, tokens) == [8, 16, 24, 32, 40]


def test_of_too_many_checkpoints_in_one_step_the_last_ones_are_left():
    driver = hybrid_driver(state_checkpoint_tokens=8)
    driver.run(range(62))
    assert checkpoints(driver, range(62)) == [40, 48, 56, 60]


def test_a_step_tells_after_which_of_its_tokens_a_state_is_wanted():
    driver = hybrid_driver(state_checkpoint_tokens=8)
    first, second = driver.add(range(18)), driver.add(range(100, 111))
    states = step_states(driver, [first, second], [5, 11])
    assert (states.cut_rows.tolist(), states.cut_tokens.tolist()) == ([1], [8])
    states = step_states(driver, [second, first], [1, 13])
    assert states.cut_rows.tolist() == [1, 1]
    assert sorted(states.cut_tokens.tolist()) == [8 - 5, 16 - 5]  # 16 is the last unit too


# --- who starts from them


def test_requests_read_one_checkpoint_and_write_pages_of_their_own():
    driver = hybrid_driver()
    driver.run(range(22))
    rows = [driver.add([*range(20), suffix, 1, 2]) for suffix in (100, 200)]
    assert [driver.num_cached[row] for row in rows] == [20, 20]
    states = step_states(driver, rows, [3, 3])
    assert states.state_in[0] == states.state_in[1]
    assert len({*states.state_in, *states.state_out}) == 3
    states = step_states(driver, rows, [1, 1])
    assert states.state_in.tolist() == states.state_out.tolist()
    assert lookup(driver, [*range(20), 300]) == 20


def test_a_new_request_starts_from_zero_however_few_tokens_its_first_step_has():  # case 46
    driver = hybrid_driver()
    driver.run(range(100, 120), num_new=2)  # leaves its state in a page that the next one takes
    row = driver.add(range(5))
    states = step_states(driver, [row], [1])
    assert states.state_in.tolist() == [driver.memory.null_ids[1]]
    states = step_states(driver, [row], [4])
    assert states.state_in.tolist() == states.state_out.tolist()


def test_a_page_with_an_old_state_is_written_before_it_is_read():  # case 47
    driver = hybrid_driver(num_slabs=8, max_model_len=28)
    memory = driver.memory.pages[1]
    memory.update({page: {0: ("seven",)} for page in range(driver.memory.null_ids[1])})
    # `KVDriver` compares each state that is read with the row's tokens
    for start in (0, 0, 100, 0):
        driver.run(range(start, start + 12), num_new=5, chunk=5)


def test_states_are_counted_by_their_own_group_not_by_the_blocks_of_attention():  # case 48
    driver = hybrid_driver(groups=((FULL, 1, 4), (STATE, 1, 16)))
    driver.run(range(33))
    row = driver.add(range(33))
    assert driver.num_cached[row] == 32
    driver.step()
    assert driver.tables[1].shape[1] == 1
    assert driver.manager.stats().referenced_pages == (9, 1)


def test_all_state_groups_start_from_the_same_token():
    driver = hybrid_driver(groups=((STATE, 1), (FULL, 2), (STATE, 3)), state_checkpoint_tokens=8)
    driver.run(range(26), chunk=8)
    assert checkpoints(driver, range(26), group=0) == checkpoints(driver, range(26), group=2) == [8, 16, 24]
    evict_page(driver.manager, 2, listed_pages(driver.manager, range(26))[24 // 4 - 1, 2])
    assert driver.run(range(26)) == 16
    # the missing one is left again
    assert driver.run(range(26)) == 24


def test_a_hit_needs_blocks_window_and_state_at_one_boundary():  # case 51
    groups = ((FULL, 1), (SlidingWindowRetention(8), 1), (STATE, 1))
    driver = hybrid_driver(num_slabs=60, groups=groups, state_checkpoint_tokens=4)
    driver.run(range(25), chunk=4)
    assert lookup(driver, [*range(25), 99]) == 25  # where it ended
    assert lookup(driver, [*range(24), 99]) == 24
    pages = listed_pages(driver.manager, range(25))
    evict_page(driver.manager, 2, pages[5, 2])  # behind 24
    evict_page(driver.manager, 1, pages[3, 1])  # read behind 16 and 20
    assert lookup(driver, [*range(24), 99]) == 12
    evict_page(driver.manager, 0, pages[2, 0])
    assert lookup(driver, [*range(24), 99]) == 8


# --- what a missing state costs, said aloud


def test_tokens_lost_to_a_missing_state_are_counted_and_the_state_is_there_next_time():  # case 44
    config = make_config(40, [(FULL, 1), (STATE, 1)], max_model_len=96, block_size=16)
    driver = KVDriver(config)
    prompts = [[*range(50), *range(start, start + 30)] for start in (100, 200, 300)]
    assert [driver.run(prompt) for prompt in prompts] == [0, 0, 48]
    stats = driver.manager.stats()
    assert (stats.tokens_lost_to_state, stats.tokens_lost_to_window) == (48, 0)


@pytest.mark.parametrize("shared", [1600, 1500])
def test_every_request_but_two_hits_a_shared_prefix_wherever_it_ends(shared):  # case 44
    config = make_config(600, [(FULL, 1), (STATE, 1)], max_model_len=2304, block_size=16)
    driver = KVDriver(config, check=False)
    hits = [driver.manager.stats().tokens_hit]
    for number in range(8):
        tokens = np.concatenate([np.arange(shared), 10_000 * (1 + number) + np.arange(2200 - shared)])
        row, cached = driver.manager.admit(tokens, num_prompt_tokens=2200)
        assert driver.manager.reserve(np.array([row]), np.array([2200 - cached])) == 1
        driver.manager.publish(np.array([row]), np.array([2200]))
        driver.manager.take_cache_update(np.array([row]))
        driver.manager.update(np.array([row]), np.array([2200 - cached]), np.array([row]), np.array([1]))
        driver.manager.free(row)
        hits.append(cached)
    assert hits[1:3] == [0, 0]
    assert set(hits[3:]) == {shared // 16 * 16}


def test_losses_to_states_and_to_windows_are_told_apart():
    groups = ((FULL, 1), (SlidingWindowRetention(8), 1), (STATE, 1))
    driver = hybrid_driver(num_slabs=60, groups=groups)
    driver.run(range(33))
    pages = listed_pages(driver.manager, range(33))
    evict_page(driver.manager, 2, pages[7, 2])
    assert driver.run(range(33), read_cache=True) == 0
    stats = driver.manager.stats()
    assert (stats.tokens_lost_to_state, stats.tokens_lost_to_window) == (32, 0)
    pages = listed_pages(driver.manager, range(33))
    evict_page(driver.manager, 1, pages[7, 1])
    assert driver.run(range(33)) == 0
    stats = driver.manager.stats()
    # behind 28 tokens the window has what it needs; 4 more are the window's, the rest the state's loss
    assert (stats.tokens_lost_to_state, stats.tokens_lost_to_window) == (32 + 28, 4)


# --- what they cost


def test_a_checkpoint_takes_only_what_is_to_spare():
    # 5 blocks and a state of one request, and nothing else
    driver = hybrid_driver(num_slabs=6, max_model_len=20)
    driver.run(range(18), num_new=2)
    stats = driver.manager.stats()
    assert (stats.checkpoints, stats.checkpoints_denied) == (0, 1)
    driver = hybrid_driver(num_slabs=7, max_model_len=20)
    driver.run(range(18), num_new=2)
    stats = driver.manager.stats()
    assert (stats.checkpoints, stats.checkpoints_denied) == (1, 0)


def test_a_checkpoint_takes_the_place_of_what_is_worth_less_and_of_nothing_else():
    # slabs of one page; what is cached for a longer prefix stays
    driver = hybrid_driver(num_slabs=14, max_model_len=32)
    driver.run(range(30), num_new=1)
    before = checkpoints(driver, range(30))
    for start in range(100, 500, 100):
        driver.run(range(start, start + 9), num_new=1)
    assert before == [28]
    assert checkpoints(driver, range(30)) == [28]


def test_a_step_that_does_not_come_back_leaves_no_checkpoint():
    driver = hybrid_driver()
    row = driver.add(range(22))
    driver.reserve([row], [22])
    driver.manager.publish(np.array([row]), np.array([22]))
    driver.free(row)
    stats = driver.manager.stats()
    assert (stats.checkpoints, stats.referenced_pages) == (0, (0, 0))
    assert checkpoints(driver, range(22)) == []


def test_a_request_that_ends_before_its_first_step_leaves_what_it_found():
    driver = hybrid_driver()
    driver.run(range(22))
    for _ in range(3):
        row = driver.add([*range(22), 1, 2, 3])
        assert driver.num_cached[row] == 22
        driver.free(row)
    assert driver.run([*range(22), 1, 2, 3]) == 22


@pytest.mark.parametrize("slack", [0, 1, 2])
def test_where_a_hit_needs_a_page_that_is_not_there_it_is_computed_again(slack):  # case 65
    driver = hybrid_driver(num_slabs=6 + slack, max_model_len=20)
    driver.run(range(17), num_new=1)
    prompt = [*range(17), 50]
    before = driver.manager.stats()
    for _ in range(10):
        assert driver.manager.can_admit(np.array(prompt))
    assert driver.manager.stats() == before
    driver.run(prompt, num_new=2)


def test_admission_looks_at_states_and_blocks_alike():  # case 77
    # blocks in plenty, and a state for three requests
    driver = hybrid_driver(num_slabs=4, groups=((FULL, 100), (STATE, 1)), max_num_seqs=8)
    rows = [driver.add([start, start + 1]) for start in (0, 100, 200)]
    driver.step()
    assert driver.add([300]) is None
    assert driver.manager.stats().free_pages == (97, 0)
    driver.free(rows[0])
    assert driver.add([300]) is not None
    driver.step()


def test_a_request_that_cannot_be_admitted_leaves_the_states_as_they_were():  # case 65
    driver = hybrid_driver(num_slabs=5, groups=((FULL, 100), (STATE, 1)), max_num_seqs=8)
    driver.run(range(22))
    before = driver.manager.stats()
    rows = [driver.add([start, start + 1]) for start in (0, 100, 200, 300)]
    driver.step()
    assert driver.add([*range(22), 1]) is None
    for row in rows:
        driver.free(row)
    assert driver.manager.stats().num_free_slabs >= before.num_free_slabs
    assert driver.manager.stats().referenced_pages == (0, 0)
