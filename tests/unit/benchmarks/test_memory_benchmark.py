"""What the memory benchmark counts: fillings that are exact, and churn that keeps its books."""

import numpy as np
import pytest
from cache_driver import CacheDriver, tokens_of
from churn import LENGTHS_FILE, Churn, Requests, conversation_lengths
from families import Family, full, sliding
from filling import PagesOfLength, fill, ideal_requests, mean_requests, usable
from memory import Row, interleave, judge, loads, vllm_figures
from pools import plan_pool

PLAIN = Family("x", "two full layers", (full(1, 64),) * 2)  # 512 bytes per token
MIXED = Family("y", "one full, two of window 48", (full(1, 64), sliding(1, 64, 48), sliding(1, 64, 48)))
BLOCK_BYTES = 16 * 512


def plan(family, num_blocks, max_model_len=2048):
    limits = {"max_model_len": max_model_len, "num_lookahead_tokens": family.num_lookahead_tokens}
    return plan_pool(family.specs(), num_blocks * BLOCK_BYTES, **limits)


def test_a_pool_of_one_kind_is_filled_to_the_last_whole_request():
    config = plan(PLAIN, 130)
    driver, lengths = fill(PLAIN, config, (100,))
    assert lengths.tolist() == [100] * 18  # 7 blocks each, of 130
    assert driver.pages_referenced().tolist() == [126]
    assert usable(PLAIN, driver, lengths) == 100 / 112
    driver.manager.check()


def test_all_requests_of_a_filling_stand_before_their_last_token():
    driver, lengths = fill(MIXED, plan(MIXED, 200), (100, 33, 64))
    assert sorted(set(lengths.tolist())) == [33, 64, 100]
    assert np.array_equal(driver.num_known[driver.rows], lengths)
    assert np.array_equal(driver.num_computed(driver.rows), lengths - 1)
    driver.manager.check()


def test_the_requests_of_a_filling_come_in_the_order_of_the_load():
    _, lengths = fill(PLAIN, plan(PLAIN, 130), (100, 33, 64))
    assert lengths.tolist()[:4] == [100, 33, 64, 100]


def test_the_ideal_counts_whole_cycles_and_the_rest():
    a, b = PLAIN.ideal_bytes(100), PLAIN.ideal_bytes(33)
    assert ideal_requests(PLAIN, int(3 * (a + b) + a), (100, 33)) == 7
    assert ideal_requests(PLAIN, int(3 * (a + b) + a) - 1, (100, 33)) == 6
    assert ideal_requests(PLAIN, int(a) - 1, (100, 33)) == 0


def test_the_mean_counts_slabs_as_the_capacity_formula_does():
    config = plan(PLAIN, 130)
    pages = PagesOfLength(config, 100)
    assert pages.mean((100,)).tolist() == [7]
    assert mean_requests(config, pages.mean((100,))) == 18
    assert mean_requests(config, pages.mean((100, 33))) == 26  # 5 blocks each


def test_a_mix_is_spread_evenly():
    order = interleave({1: 10, 2: 6, 3: 4})
    assert sorted(order) == [1] * 10 + [2] * 6 + [3] * 4
    for count in range(1, 20):
        assert abs(order[:count].count(1) - count / 2) <= 1
        assert abs(order[:count].count(3) - count / 5) <= 1


def test_no_load_is_longer_than_the_model():
    assert set(loads(32_768)) == {"100", "1000", "8192", "32768", "chat", "short", "U[32,2048]", "logU[64,16384]"}
    assert set(loads(131_072)) > set(loads(32_768))


def test_the_figures_of_vllm_cover_every_load_of_every_family():
    figures = vllm_figures()
    assert figures["2a", "32768"] == (0.977, 10)
    assert figures["8b", "U[32,2048]"] == (None, 73)


@pytest.mark.parametrize(
    ("load", "usable_share", "requests", "missed"),
    [
        ("100", 0.88, 732, []),
        ("100", 0.87, 732, ["usable < 0.88"]),
        ("1000", 0.96, 80, ["usable < 0.97"]),
        ("32768", 0.98, 12, []),
        ("32768", 0.98, 11, ["requests < 12"]),
        ("32768", 0.98, 9, ["requests < 12", "requests < vLLM's"]),
    ],
)
def test_a_row_is_judged_by_the_marks(load, usable_share, requests, missed):
    ideal = {"100": 755, "1000": 83, "32768": 13}[load]
    row = Row("2a", load, usable_share, requests, ideal, mean_requests=0)
    judge(row)
    assert row.missed == missed


def test_tokens_depend_on_request_and_position_alone():
    one = tokens_of(3, np.arange(100))
    assert one.dtype == np.int32
    assert np.array_equal(one[40:], tokens_of(3, np.arange(40, 100)))
    assert np.array_equal(one, tokens_of(np.full(100, 3), np.arange(100)))
    assert not np.array_equal(one, tokens_of(4, np.arange(100)))


def test_a_preempted_request_finds_its_own_prefix_again():
    driver = CacheDriver(plan(PLAIN, 130), 4, 512)
    row = driver.admit(1, 100, 100)
    driver.prefill(row)
    for _ in range(20):
        assert driver.reserve(driver.rows, np.array([1])) == 1
        driver.compute(driver.rows, np.array([1]))
    known = int(driver.num_known[row])
    driver.free(driver.rows.copy())
    assert len(driver.rows) == 0
    row = driver.admit(1, known, 100)
    assert driver.num_computed(np.array([row]))[0] >= 112


def test_conversations_are_scaled_and_cut():
    lengths = conversation_lengths()
    assert lengths.shape == (12_000, 2)
    assert LENGTHS_FILE.read_text().startswith("# Prompt and output token counts")
    requests = Requests(scale=16, longest=4096, seed=0)
    assert requests.lengths.sum(axis=1).max() <= 4096
    assert requests.lengths.min() >= 1
    for _ in range(50):
        prompt, known, total = requests.draw_in_flight()
        assert 0 < prompt <= known < total <= 4096


@pytest.mark.parametrize("family", [PLAIN, MIXED], ids=["plain", "mixed"])
def test_churn_saturates_the_pool_and_keeps_its_books(family):
    churn = Churn(family, plan(family, 1500), scale=1, seed=1)
    result = churn.run(150)
    churn.driver.manager.check()
    assert result.steps > 100
    assert 0.5 < result.min_usable <= result.mean_usable <= 1
    assert 0 < result.mean_occupancy <= result.mean_usable
    assert result.finished > 10
    running = churn.driver.rows
    assert (churn.driver.num_known[running] <= churn.num_total[running]).all()
    serials = [*churn.driver.serial[running].tolist(), *(request.serial for request in churn.queue)]
    assert len(set(serials)) == len(serials), "a request is there twice"
    assert len(serials) == churn.num_drawn - churn.finished, "a request is lost"
