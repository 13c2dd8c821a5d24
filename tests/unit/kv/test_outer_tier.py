"""Cache contents that come from and go to a store outside the pool, at the manager's level with a fake store."""

import numpy as np
import pytest
from kv_driver import KVDriver, evict_page, listed_pages, make_config
from outer_tier import Load, OuterTier, Parking, store_slowly

from girih.kv.specs.full_attention import FullAttentionRetention
from girih.kv.specs.sliding_window import SlidingWindowRetention
from girih.kv.specs.state import StateRetention

FULL, WINDOW, STATE = FullAttentionRetention(), SlidingWindowRetention(6), StateRetention()
MIXES = [
    [(FULL, 1)],
    [(FULL, 2), (WINDOW, 3)],
    [(FULL, 2), (STATE, 1)],
    [(FULL, 2, 8), (WINDOW, 1, 4), (STATE, 1)],
]


def driver_of(groups, num_slabs=40, **options):
    return KVDriver(make_config(num_slabs, groups, max_model_len=64), **options)


@pytest.mark.parametrize("groups", MIXES)
@pytest.mark.parametrize("length", [32, 33, 35])
def test_a_store_that_has_the_whole_prompt_leaves_a_token_to_compute(groups, length):  # case 39
    driver, tier = driver_of(groups, state_checkpoint_tokens=4), OuterTier()
    driver.run(range(36), chunk=4)
    tier.store(driver, range(36))
    assert driver.manager.reset_prefix_cache()
    row = driver.add(range(length))
    load = Load(driver, tier, row)
    assert load.num_tokens == (length - 1) // 4 * 4
    assert load.complete()
    driver.step()
    assert len(driver.rows[row]) == length + 1


def test_a_boundary_without_a_state_is_not_stored():  # case 49
    driver, tier = driver_of([(FULL, 1), (STATE, 1)], state_checkpoint_tokens=8), OuterTier()
    driver.run(range(18), chunk=8)
    assert (listed_pages(driver.manager, range(16))[:, 1] > 0).tolist() == [False, True, False, True]
    tier.store(driver, range(16))
    assert sorted(len(tokens) for group, tokens in tier.contents if group == 1) == [8, 16]
    other = driver_of([(FULL, 1), (STATE, 1)])
    assert [tier.usable_tokens(other, range(length)) for length in (8, 9, 16, 17)] == [0, 8, 8, 16]


def test_attention_alone_is_not_enough_for_a_hybrid():  # case 50
    driver, tier = driver_of([(FULL, 1), (STATE, 1)]), OuterTier()
    driver.run(range(33))
    tier.store(driver, range(32))
    tier.contents = {key: content for key, content in tier.contents.items() if key[0] == 0}
    assert tier.usable_tokens(driver, range(33)) == 0
    assert tier.usable_tokens(driver_of([(FULL, 1)]), range(33)) == 32


@pytest.mark.parametrize("groups", MIXES)
def test_cold_restored_and_reused_requests_hold_the_same(groups):  # case 62
    driver, tier = driver_of(groups), OuterTier()
    prompt = [*range(30)]
    row = driver.add(prompt)
    for _ in range(8):
        driver.step(7, sample=lambda row: 50)
    cold = driver.rows[row]
    driver.free(row)
    tier.store(driver, prompt)
    for group in range(len(groups)):
        for page in {*listed_pages(driver.manager, prompt)[:, group].tolist()} - {0}:
            evict_page(driver.manager, group, page)
    assert driver.manager.lookup(np.array(prompt)) == 0
    row = driver.add(prompt)
    assert Load(driver, tier, row).complete()
    assert driver.manager.num_computed_tokens[row] == 28
    while len(driver.rows[row]) < len(cold):
        driver.step(7, sample=lambda row: 50)  # `KVDriver` compares what is read with what a cold run holds
    assert driver.rows[row] == cold
    driver.free(row)
    assert driver.run([*cold, 1, 2]) == len(cold) - 1


def test_a_request_aborted_during_a_load_gives_back_its_pages_and_a_late_load_harms_nobody():  # case 71
    driver, tier = driver_of([(FULL, 1)], num_slabs=16), OuterTier()
    driver.run(range(33))
    tier.store(driver, range(32))
    driver.manager.reset_prefix_cache()
    row = driver.add(range(33))
    load = Load(driver, tier, row)
    assert not driver.manager.can_admit(np.arange(100, 162))
    driver.free(row)  # bounded waiting is the scheduler's; what it does then is this
    assert driver.add(range(100, 162)) == row
    driver.step()
    assert load.complete() is False
    driver.step()
    assert driver.manager.lookup(np.arange(33)) == 0


@pytest.mark.parametrize(("num_ranks", "keeps"), [(1, True), (2, True), (1, False)])
def test_blocks_that_a_store_still_reads_are_not_given_away(num_ranks, keeps):  # case 72
    driver, tier = driver_of([(FULL, 1)], num_slabs=16), OuterTier()
    source = driver.add(range(17))
    driver.step()
    slow = store_slowly(driver, tier, [*range(17)], num_ranks, keeps)
    next(slow)
    next(slow)
    driver.free(source)  # preempted
    assert driver.add(range(100, 162)) is None or not keeps
    if keeps:
        assert driver.add(range(100, 139)) is not None  # in the end 12 of the 16 blocks
    driver.step()
    for _ in slow:
        driver.step()
    right = {(0, tuple(range(end))): tuple(range(end)) for end in (4, 8, 12, 16)}
    last = {key: content.get(3) for key, content in tier.contents.items()}
    assert (last == right) == keeps
    for row in list(driver.rows):
        driver.free(row)
    driver.manager.check()
    assert driver.manager.num_running == 0


def test_a_load_holds_its_requests_whole_need_so_that_two_cannot_wait_for_each_other():  # case 80
    driver = driver_of([(FULL, 1)], num_slabs=7)
    first = driver.add(range(16))  # to load 4 blocks, then one more
    assert driver.manager.can_admit(np.arange(100, 112))  # 3 and one more: nothing is held yet
    spoken_for = np.array([5])
    assert not driver.manager.can_admit(np.arange(100, 112), spoken_for=spoken_for)
    assert driver.reserve([first], [17]) == 1
    assert not driver.manager.can_admit(np.arange(100, 112))
    assert driver.manager.can_admit(np.arange(100, 107))


def test_requests_that_wait_for_a_store_take_no_row_from_others_and_give_up():  # case 81
    driver = driver_of([(FULL, 1)], max_num_seqs=4)
    parking, is_ready = Parking(driver, patience_steps=5), [False] * 5
    for number in range(5):
        parking.park(range(100 * number, 100 * number + 9), lambda number=number: is_ready[number])
    plain = [driver.add(range(1000 + number, 1009 + number)) for number in range(4)]
    assert None not in plain, "the running limit counts who runs"
    for row in plain:
        driver.step()
        parking.step()
        driver.free(row)
    is_ready[3] = True
    parking.step()
    assert list(driver.rows.values()) == [[*range(300, 309)]]
    for _ in range(2):
        parking.step()
    assert not parking.parked
    assert sorted(tokens[0] for tokens in parking.errors) == [0, 100, 200, 400]
    assert driver.manager.num_running == 1
