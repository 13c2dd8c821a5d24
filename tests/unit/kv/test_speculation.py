"""Draft tokens at the manager's level: a fake speculator guesses, some guesses are right, and nothing else changes.

Girih runs no draft model yet. What its cache must do is here: room for the guesses, windows that slide by confirmed
tokens, states and keys of confirmed tokens only.
"""

import numpy as np
import pytest
from kv_driver import KVDriver, listed_pages, make_config

from girih.kv.specs.chunked_local import ChunkedLocalRetention
from girih.kv.specs.full_attention import FullAttentionRetention
from girih.kv.specs.sliding_window import SlidingWindowRetention
from girih.kv.specs.state import StateRetention

FULL, STATE = FullAttentionRetention(), StateRetention()
MIXES = [
    [(FULL, 1)],
    [(FULL, 2), (SlidingWindowRetention(6), 3)],
    [(FULL, 2), (STATE, 1)],
    [(STATE, 3)],
    [(FULL, 1, 8), (ChunkedLocalRetention(8), 2, 4), (STATE, 1)],
]


def next_token(tokens):
    """The model: the token that follows, whoever guessed the ones before."""
    return (31 * sum(tokens[-5:]) + len(tokens)) % 97


class Speculator:
    """Guesses so many tokens in each decode step, of which so many are right."""

    def __init__(self, driver, num_drafts, right=0):
        self.driver = driver
        self.num_drafts = num_drafts
        self.right = right

    def step(self, chunk=1 << 30):
        """Schedule as many tokens of each row as there are, and guesses behind the last known one."""
        driver, manager = self.driver, self.driver.manager
        counts, drafts, accepted = {}, {}, {}
        for row, tokens in driver.rows.items():
            left = len(tokens) - int(manager.num_computed_tokens[row])
            counts[row] = min(chunk, left)
            if left == 1 and self.num_drafts:
                true = list(tokens)
                for _ in range(self.num_drafts):
                    true.append(next_token(true))
                guesses = true[len(tokens) :]
                guesses[self.right :] = [-1] * len(guesses[self.right :])
                room = driver.config.max_model_len - len(tokens) - 1  # the last token of all is sampled
                drafts[row] = guesses
                accepted[row] = 1 + max(0, min(self.right, self.num_drafts, room))
        rows, scheduled = np.array(list(counts)), np.array(list(counts.values()))
        assert driver.reserve(rows, scheduled) == len(rows)
        manager.publish(rows, manager.num_computed_tokens[rows] + scheduled)
        driver.compute(
            rows, scheduled, accepted=accepted, drafts=drafts,
            sample=lambda row: next_token([*driver.rows[row], *drafts.get(row, [])[: accepted.get(row, 1) - 1]]),
        )  # fmt: skip

    def finish(self, row, length, chunk=1 << 30):
        """Run a row to a length and free it; return its tokens."""
        while len(self.driver.rows[row]) < length:
            self.step(chunk)
        tokens = list(self.driver.rows[row])
        self.driver.free(row)
        return tokens


def driver_of(groups, num_drafts, max_model_len=64, num_slabs=60, **options):
    config = make_config(num_slabs, groups, max_model_len, num_lookahead_tokens=num_drafts)
    return KVDriver(config, **options)


def plain_tokens(prompt, length):
    tokens = list(prompt)
    while len(tokens) < length:
        tokens.append(next_token(tokens))
    return tokens


@pytest.mark.parametrize("groups", MIXES)
@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_tokens_are_those_of_a_run_without_guesses(groups, right):
    driver = driver_of(groups, 3)
    speculator = Speculator(driver, 3, right)
    rows = {prompt: driver.add(range(prompt)) for prompt in (6, 7)}
    for prompt, row in rows.items():
        tokens = speculator.finish(row, 40)
        assert tokens == plain_tokens(range(prompt), len(tokens))


@pytest.mark.parametrize("groups", MIXES)
@pytest.mark.parametrize(("prompt", "right"), [(21, 0), (21, 1), (22, 1), (23, 1), (24, 1), (21, 3), (22, 2)])
def test_only_what_is_confirmed_is_found_by_others(groups, prompt, right):  # case 43
    driver = driver_of(groups, 3, max_model_len=96, check=False)
    speculator = Speculator(driver, 3, right)
    tokens = speculator.finish(driver.add(range(prompt)), prompt + 24)
    assert tokens == plain_tokens(range(prompt), len(tokens))
    # behind the last confirmed token; the sampled one after it was never computed
    assert driver.manager.lookup(np.array([*tokens, 1])) == len(tokens) - 1
    # whatever is reused, `KVDriver` compares it with what a cold run would hold
    for end in range(len(tokens), prompt, -1):
        driver.run([*tokens[:end], 500 + end])
    driver.manager.check()


def test_a_state_behind_rejected_tokens_is_not_kept_where_a_confirmed_one_would_be():  # case 43
    # 2 of 3 guesses would reach the boundary behind token 8; one is right
    driver = driver_of([(FULL, 1), (STATE, 1)], 3, state_checkpoint_tokens=4)
    speculator = Speculator(driver, 3, right=1)
    row = driver.add(range(5))
    speculator.step()
    assert driver.manager.num_computed_tokens[row] == 5
    speculator.step()
    assert driver.manager.num_computed_tokens[row] == 7
    assert listed_pages(driver.manager, driver.rows[row])[:, 1].tolist()[1:] == [0]
    tokens = list(driver.rows[row])
    driver.free(row)
    assert driver.manager.lookup(np.array([*tokens, 1])) == 7
    assert driver.manager.lookup(np.array([*tokens[:7], -1, 5, 5])) == 7
    assert driver.run([*tokens[:7], -1, 5, 5]) == 7


@pytest.mark.parametrize("computed", [7, 8, 9])
def test_a_checkpoint_that_the_step_did_not_reach_is_withdrawn(computed):  # case 43
    driver = driver_of([(FULL, 1), (STATE, 1)], 0)
    row = driver.add(range(12))
    driver.reserve([row], [12])
    driver.manager.publish(np.array([row]), np.array([12]))
    assert driver.manager.stats().referenced_pages == (3, 2)
    driver.compute(np.array([row]), np.array([12]), accepted={row: computed})
    stats = driver.manager.stats()
    assert stats.referenced_pages == (3, 1)
    assert stats.checkpoints == (computed >= 8)
    assert (listed_pages(driver.manager, range(12))[1, 1] > 0) == (computed >= 8)
    driver.step()


def test_a_request_holds_a_state_for_each_guess_and_blocks_for_all():
    driver = driver_of([(FULL, 1), (STATE, 1)], 3)
    driver.add(range(6))
    Speculator(driver, 3).step()
    assert driver.manager.stats().referenced_pages == (3, 1 + 3)  # 6 + 3 tokens


def test_windows_slide_by_confirmed_tokens():
    driver = driver_of([(SlidingWindowRetention(5), 1)], 3)
    row = driver.add(range(8))
    speculator = Speculator(driver, 3, right=0)
    firsts = []
    for _ in range(6):
        speculator.step()
        live = np.flatnonzero(driver.tables[0][row] != driver.memory.null_ids[0])
        firsts.append((int(driver.manager.num_computed_tokens[row]), int(live[0])))
    # the step behind n tokens reads n - 4 and later, however many guesses it writes
    assert firsts == [(8, 0), (9, 1), (10, 1), (11, 1), (12, 1), (13, 2)]


@pytest.mark.parametrize("right", [0, 1, 3])
@pytest.mark.parametrize(
    "groups", [[(FULL, 1, 16)], [(FULL, 1, 16), (STATE, 1)], [(SlidingWindowRetention(20), 1, 16)]]
)
def test_a_request_ends_at_the_longest_length_within_its_table(groups, right):  # case 118
    driver = driver_of(groups, 3, max_model_len=64)
    tokens = Speculator(driver, 3, right).finish(driver.add(range(60)), 64)
    assert tokens == plain_tokens(range(60), 64)
    assert driver.tables[0].shape[1] == -(-(64 + 3) // 16)
    assert driver.manager.max_request_tokens == 64


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
@pytest.mark.parametrize("groups", MIXES)
def test_preempted_requests_end_with_the_same_tokens(groups, num_drafts):  # case 69
    # a result that was under way when its request was chosen to be preempted is taken in first, or not at all
    driver = driver_of(groups, num_drafts)
    speculator = Speculator(driver, num_drafts, right=1)
    prompts = {0: range(9), 1: range(100, 106)}
    rows = {name: driver.add(prompt) for name, prompt in prompts.items()}
    for step in range(14):
        name = step % 2
        speculator.step(chunk=5)
        tokens = list(driver.rows[rows[name]])
        driver.free(rows[name])
        if step % 3 == 0:  # scheduled again, and preempted before the step was handed out
            row = driver.add(tokens)
            driver.reserve([row], [1])
            driver.free(row)
        rows[name] = driver.add(tokens, num_prompt=len(prompts[name]))
    for name, row in rows.items():
        tokens = speculator.finish(row, 40)
        assert tokens == plain_tokens(prompts[name], len(tokens))
