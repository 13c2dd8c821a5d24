"""Cross attention at the manager's level: the encoder's blocks come with a request and go with it."""

import numpy as np
import pytest
from kv_driver import KVDriver, make_config

from girih.kv.specs.cross_attention import CrossAttentionRetention
from girih.kv.specs.full_attention import FullAttentionRetention

FULL, CROSS = FullAttentionRetention(), CrossAttentionRetention(7)


def driver_of(num_slabs=20, **options):
    return KVDriver(make_config(num_slabs, [(FULL, 1), (CROSS, 1)], max_model_len=32), **options)


def test_a_request_preempted_twice_gives_back_all_its_blocks_each_time():  # case 74
    driver = driver_of()
    tokens = list(range(6))
    for _ in range(2):
        row = driver.add(tokens)
        for _ in range(3):
            driver.step()
        assert driver.manager.stats().referenced_pages[1] == 2
        tokens = list(driver.rows[row])
        driver.free(row)
        stats = driver.manager.stats()
        assert (stats.referenced_pages, stats.num_free_slabs) == ((0, 0), 20)
    row = driver.add(tokens)
    assert driver.num_cached[row] == 0
    driver.step()


def test_the_encoders_blocks_are_there_from_the_first_token_and_do_not_grow():
    driver = driver_of()
    driver.add(range(20))
    held = []
    for _ in range(8):
        driver.step(3)
        held.append(driver.manager.stats().referenced_pages)
    assert {cross for _, cross in held} == {2}
    assert [full for full, _ in held][:3] == [1, 2, 3]


@pytest.mark.parametrize(("chunk", "max_model_len"), [(8192, 448), (1, 448), (64, 2048)])
def test_the_encoders_blocks_follow_from_its_length_alone(chunk, max_model_len):  # case 20
    groups = [(FULL, 1), (CrossAttentionRetention(1500), 1)]
    driver = KVDriver(make_config(300, groups, max_model_len, block_size=16), check=False)
    driver.add(range(200))
    driver.step(chunk)
    assert driver.manager.stats().referenced_pages[1] == 94


def test_equal_prompts_of_different_recordings_share_nothing():
    driver = driver_of()
    assert [driver.run(range(9)), driver.run(range(9))] == [0, 0]
    stats = driver.manager.stats()
    assert (stats.tokens_looked_up, stats.cached_pages) == (0, (0, 0))


def test_a_request_is_admitted_with_its_encoders_blocks():
    driver = driver_of(num_slabs=7)
    assert driver.manager.can_admit(np.arange(19))
    assert not driver.manager.can_admit(np.arange(20))
    assert driver.manager.max_request_tokens == 20
    driver.run(range(19))
