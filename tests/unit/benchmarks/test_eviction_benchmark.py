"""The models of other caches keep what their rule says, and every cache finds the same when nothing is evicted."""

import numpy as np
import pytest
from eviction import MODELS, manager_hits, shape_of
from eviction_policies import EXTRA, FULL, CacheShape, Marconi, PageCache, Tree
from eviction_traces import TRACES, TracedRequest

STATES = CacheShape(full_bytes=1, extra_bytes=10, window_blocks=None, token_flops=1, position_flops=0)
WINDOW = CacheShape(full_bytes=1, extra_bytes=1, window_blocks=2, token_flops=1, position_flops=0)
CACHES = {
    "LRU": lambda shape, size: PageCache(shape, size, balanced=False),
    "Jenga": lambda shape, size: PageCache(shape, size, balanced=True),
    "Marconi": lambda shape, size: Marconi(shape, size, alpha=0.5),
}


def request(*blocks, prompt_blocks=1):
    """A request whose blocks are filled with these numbers, and its last token."""
    token_ids = np.append(np.repeat(np.array(blocks, dtype=np.int32), 16), np.int32(0))
    return TracedRequest(token_ids, 16 * prompt_blocks + 1)


def held_bytes(cache):
    pages = cache._time if isinstance(cache, PageCache) else cache._pages
    return sum(cache._bytes(page) for page in pages)


@pytest.mark.parametrize("name", TRACES)
def test_requests_of_a_trace_fill_whole_blocks_but_for_their_last_token(name):
    requests = list(TRACES[name](40))
    assert len(requests) == 40
    for one in requests:
        assert len(one.token_ids) % 16 == 1
        assert 0 < one.num_prompt < len(one.token_ids)
    again = list(TRACES[name](40))
    assert all(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(requests, again, strict=True))


def test_a_turn_of_a_chat_begins_with_all_that_was_said():
    said = []
    continued = 0
    for one in TRACES["chats"](60, num_open=3, num_prefixes=1):
        matches = [old for old in said if np.array_equal(one.token_ids[: len(old)], old)]
        continued += bool(matches)
        said.append(one.token_ids)
    assert continued > 30


def test_equal_prefixes_have_one_number():
    tree = Tree()
    assert tree.path(request(1, 2).token_ids) == [1, 2]
    assert tree.path(request(1, 3, 2).token_ids) == [1, 3, 4]
    assert tree.path(request(2, 1).token_ids) == [5, 6]


@pytest.mark.parametrize("shape", [STATES, WINDOW], ids=["states", "window"])
@pytest.mark.parametrize("name", CACHES)
def test_the_next_turn_starts_where_the_last_one_ended(name, shape):
    cache = CACHES[name](shape, 1000)
    assert cache.run(request(1, 2, 3)) == 0
    assert cache.run(request(1, 2, 3, 4, 5, prompt_blocks=4)) == 48


@pytest.mark.parametrize("name", CACHES)
def test_a_state_is_needed_at_exactly_the_end_of_a_prefix(name):
    cache = CACHES[name](STATES, 1000)
    cache.run(request(1, 2, 3, 4, prompt_blocks=3))
    assert cache.run(request(1, 2, 9, prompt_blocks=3)) == 0, "there was none where they part"
    assert cache.run(request(1, 2, 8, prompt_blocks=3)) == 32, "now there is"


@pytest.mark.parametrize("shape", [STATES, WINDOW], ids=["states", "window"])
@pytest.mark.parametrize("name", CACHES)
def test_no_more_is_kept_than_fits_and_the_account_is_right(name, shape):
    cache = CACHES[name](shape, 60)
    rng = np.random.default_rng(0)
    for _ in range(200):
        blocks = rng.integers(0, 3, rng.integers(2, 7))
        hit = cache.run(request(*blocks.tolist(), prompt_blocks=len(blocks) - 1))
        assert hit % 16 == 0
        assert hit <= 16 * (len(blocks) - 1)
        assert cache.used_bytes == held_bytes(cache) <= 60


def test_the_least_recently_used_sequence_loses_its_end_first():
    cache = CACHES["Jenga"](WINDOW, 10)
    cache.run(request(1, 2, 3))
    cache.run(request(7, 8))
    cache.run(request(5))
    old, known = cache.tree.path(request(1, 2, 3).token_ids), cache._time
    assert (FULL, old[0]) in known
    assert (FULL, old[2]) not in known or (EXTRA, old[2]) not in known
    assert cache.run(request(7, 8, 9, prompt_blocks=2)) == 32


def test_marconi_keeps_what_saves_most_when_age_does_not_count():
    cache = Marconi(STATES, 62, alpha=1000.0)
    cache.run(request(*range(20)))
    cache.run(request(100, 101))
    cache.run(request(200, 201))  # a short one makes room, although the long one is older
    assert cache.run(request(*range(20), 99, prompt_blocks=20)) == 320


@pytest.mark.parametrize("name", MODELS)
def test_the_bytes_of_a_model_are_split_between_its_groups(name):
    shape = shape_of(name)
    tokens = sum(layer.token_bytes for layer in MODELS[name])
    states = sum(layer.state_bytes for layer in MODELS[name])
    assert shape.full_bytes + shape.extra_bytes == 16 * tokens + states
    assert shape.window_blocks == (None if states else 64)


@pytest.mark.parametrize("name", MODELS)
def test_without_eviction_the_manager_finds_what_the_models_find(name):
    requests = list(TRACES["chats"](25, num_open=4, num_prefixes=2))
    pool_bytes = 64 << 30
    model = PageCache(shape_of(name), pool_bytes, balanced=True)
    expected = sum(model.run(one) for one in requests)
    assert manager_hits(name, pool_bytes, requests) == expected > 0
