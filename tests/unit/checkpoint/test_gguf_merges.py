"""Merges from a vocabulary and scores, against a loop over every cut."""

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from girih.checkpoint.gguf_merges import derive_merges


def merges_by_loop(tokens: list[str], scores: np.ndarray) -> list[tuple[str, str]]:
    """Say the same in the plainest way."""
    index = {token: i for i, token in enumerate(tokens)}
    found = []
    for owner, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in index and right in index:
                found.append((-scores[owner], owner, index[left], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def merges(tokens: list[str], scores: np.ndarray) -> list[tuple[str, str]]:
    left, right = derive_merges(tokens, scores)
    return [(tokens[a], tokens[b]) for a, b in zip(left, right, strict=True)]


def test_every_cut_into_two_pieces_is_a_merge_best_score_first() -> None:
    tokens = ["a", "b", "c", "ab", "bc", "abc", "xbc"]
    scores = np.array([-9, -9, -9, -2, -1, -3, 0])
    assert merges(tokens, scores) == [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")]


def test_pieces_of_equal_score_keep_the_order_of_the_vocabulary() -> None:
    tokens = ["b", "a", "ba", "ab", "aa"]
    assert merges(tokens, np.zeros(5)) == [("b", "a"), ("a", "b"), ("a", "a")]


def test_characters_outside_the_basic_plane_are_one_character() -> None:
    assert merges(["😀", "𠮷", "😀𠮷"], np.zeros(3)) == [("😀", "𠮷")]


def test_nothing_to_merge() -> None:
    assert merges([], np.zeros(0)) == []
    assert merges(["a", "b"], np.zeros(2)) == []


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.text("ab▁\n😀", min_size=1, max_size=6), unique=True, max_size=60),
    seed=st.integers(0, 1000),
)
def test_it_equals_the_loop(tokens: list[str], seed: int) -> None:
    scores = np.random.default_rng(seed).integers(-5, 5, len(tokens)).astype(np.float32)
    assert merges(tokens, scores) == merges_by_loop(tokens, scores)


def test_a_vocabulary_of_262144_takes_seconds_at_most() -> None:
    rng = np.random.default_rng(0)
    letters = rng.integers(97, 123, (400_000, 8), np.uint8).tobytes().decode()
    words = (letters[8 * i : 8 * i + 1 + i % 8] for i in range(400_000))
    tokens = list(dict.fromkeys(words))[:262_144]
    start_s = time.perf_counter()
    left, _ = derive_merges(tokens, -np.arange(len(tokens), dtype=np.float32))
    assert time.perf_counter() - start_s < 10
    assert len(left) > 10_000
