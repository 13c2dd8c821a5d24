"""Where requests go: what a router knows of each replica's cache, the rule, and what both are worth."""

import asyncio
import random
from contextlib import contextmanager

import numpy as np
import pytest
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st
from kv_driver import SECRET, KVDriver, make_config

from girih.kv.hashing import TokenHasher
from girih.kv.specs.full_attention import FullAttentionRetention
from girih.kv.specs.sliding_window import SlidingWindowRetention
from girih.kv.specs.state import StateRetention
from girih.server import kv_events
from girih.server.kv_event_format import AllBlocksCleared, BlockRemoved, BlockStored, write_events
from girih.server.kv_events import KVEventPublisher
from girih.server.replicas.cached_units import CachedUnits, retained
from girih.server.replicas.follower import Follower, Source
from girih.server.replicas.placement import TOKENS_PER_SEQUENCE, Placement

FULL, WINDOW, STATE = FullAttentionRetention(), SlidingWindowRetention(9), StateRetention()
UNIT = 4
NUM_GROUPS, HASHES = 2, range(6)


def stored(group, hashes):
    return BlockStored(list(hashes), None, [], UNIT, None, "GPU", None, group_idx=group)


def hashes_of(tokens, salt=""):
    hasher = TokenHasher(UNIT, SECRET)
    return hasher.chain(hasher.root(salt), np.array(tokens, dtype=np.int32))[:, 0].tolist()


# ---- what is known of a replica

events = st.one_of(
    st.builds(stored, st.integers(0, NUM_GROUPS - 1), st.lists(st.sampled_from(HASHES))),
    st.builds(
        lambda group, hashes: BlockRemoved(hashes, "GPU", group),
        st.integers(0, NUM_GROUPS - 1),
        st.lists(st.sampled_from(HASHES)),
    ),
    st.just(AllBlocksCleared()),
)


@given(st.lists(events), st.permutations(HASHES))
def test_a_prompt_is_cached_up_to_the_last_unit_where_all_groups_have_what_is_read(history, prompt):
    units, known = CachedUnits(UNIT, [(FULL, 1), (STATE, 1)]), set()
    for event in history:
        units.apply(event)
        match event:
            case BlockStored():
                known |= {(event.group_idx, unit) for unit in event.block_hashes}
            case BlockRemoved():
                known -= {(event.group_idx, unit) for unit in event.block_hashes}
            case AllBlocksCleared():
                known.clear()
    assert len(units) == len({unit for _, unit in known})
    depths = [n for n in range(1, 7) if {(0, unit) for unit in prompt[:n]} | {(1, prompt[n - 1])} <= known]
    assert units.num_leading(prompt) == max(depths, default=0)


def test_memory_is_bounded_and_the_oldest_units_are_forgotten():
    units = CachedUnits(UNIT, [(FULL, 1)], max_units=3)
    units.apply(stored(0, [1, 2, 3, 4, 5]))
    assert len(units) == 3
    assert [units.num_leading([unit]) for unit in range(1, 6)] == [0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    "groups", [[(FULL, 2)], [(FULL, 3), (WINDOW, 2)], [(FULL, 2), (STATE, 1)], [(FULL, 2, 8), (WINDOW, 2, 4)]]
)
def test_what_the_events_of_a_cache_tell_is_what_its_next_request_finds(groups):
    driver = KVDriver(make_config(12, groups), log_events=True)
    units = CachedUnits(UNIT, retained(driver.groups, UNIT))
    rng, found = random.Random(0), 0
    for _ in range(60):
        length, branch, salt = rng.randint(2, 40), rng.randint(0, 30), rng.choice(["", "mine"])
        prompt = [i if i < branch else 1000 + branch + i for i in range(length)]
        for event in write_events(driver.manager.take_events(), tells_tokens=False):
            units.apply(event)
        cached = driver.run(prompt, salt=salt)
        leading = units.num_leading(hashes_of(prompt, salt)) * UNIT
        # of a prompt that is cached whole the last token is computed; what is cached of parts of units is not told
        assert cached >= leading or cached == length - 1 or leading == length
        assert cached < leading + UNIT or any(group.retention.holds_state for group in driver.groups)
        found += leading > 0
    assert found > 10


# ---- the rule


def test_a_prompt_goes_to_the_replica_that_has_most_of_it_until_others_have_less_to_do():
    placement = Placement()
    cached = {"a": 0, "b": 2 * TOKENS_PER_SEQUENCE + 32, "c": 16}
    chosen = []
    for i in range(6):
        chosen.append(placement.rank(cached)[0])
        placement.begin(str(i), chosen[-1], 1)
    assert chosen == ["b", "b", "b", "c", "a", "b"]


def test_requests_without_a_known_prefix_take_turns():
    placement, chosen = Placement(), []
    for i in range(6):
        chosen.append(placement.rank(dict.fromkeys("abc", 0))[0])
        placement.begin(str(i), chosen[-1], 1)
        if i % 2:
            placement.end(str(i))
    assert sorted(chosen[:3]) == ["a", "b", "c"]
    placement = Placement()
    for i in range(6):  # one after the other
        chosen.append(placement.rank(dict.fromkeys("abc", 0))[0])
        placement.begin(str(i), chosen[-1], 1)
        placement.end(str(i))
    assert chosen[6:] == ["a", "b", "c", "a", "b", "c"]


def test_a_request_counts_with_all_its_sequences_where_it_really_went_until_it_ends():
    placement, equal = Placement(), dict.fromkeys("ab", 0)
    placement.begin("wide", "a", 8)
    for i in range(8):
        assert placement.rank(equal)[0] == "b"
        placement.begin(str(i), "b", 1)
    placement.move("wide", "b")
    assert placement.rank(equal) == ["a", "b"]
    placement.move("ended", "a")
    for name in ("wide", "wide", "unknown", *map(str, range(8))):
        placement.end(name)
    assert not any(placement._num_sequences.values())
    placement.begin("lost", "a", 5)
    placement.forget("a")
    assert placement.rank(equal)[0] == "a"
    placement.end("lost")
    assert placement._num_sequences["a"] == 0


def hit_share(choose):
    """Return the share of prompt tokens that four replicas find cached when `choose(prompt, units)` names one."""
    drivers = [KVDriver(make_config(12, [(FULL, 2)], max_model_len=64), log_events=True) for _ in range(4)]
    units = [CachedUnits(UNIT, [(FULL, 1)]) for _ in drivers]
    rng, hit, total = random.Random(1), 0, 0
    for i in range(200):
        prompt = [*range(100 * (prefix := rng.randrange(8)), 100 * prefix + 32), 5000 + i]
        index = choose(prompt, units)
        hit, total = hit + drivers[index].run(prompt), total + len(prompt)
        for event in write_events(drivers[index].manager.take_events(), tells_tokens=False):
            units[index].apply(event)
    return hit / total


def test_prompts_with_shared_prefixes_hit_far_more_often_than_with_random_routing():
    placement, rng = Placement(), random.Random(2)

    def by_rule(prompt, units):
        hashes = hashes_of(prompt)
        chosen = placement.rank({i: known.num_leading(hashes) * UNIT for i, known in enumerate(units)})[0]
        placement.begin("it", chosen, 1)
        placement.end("it")
        return chosen

    ours, at_random = hit_share(by_rule), hit_share(lambda prompt, units: rng.randrange(4))
    assert ours > 0.85
    assert at_random < 0.5


# ---- following a replica's events


class Followed:
    """A publisher of a real cache and who follows it."""

    def __init__(self):
        self.driver = KVDriver(make_config(12, [(FULL, 2)]), log_events=True)
        self.publisher = KVEventPublisher(
            endpoint="tcp://127.0.0.1:0",
            replay_endpoint="tcp://127.0.0.1:0",
            tells_tokens=False,
        )
        self.context = zmq.asyncio.Context()
        source = Source(
            self.publisher.endpoint, self.publisher.replay_endpoint, UNIT, [(FULL.to_json(), 1)], SECRET.hex()
        )
        self.follower = Follower(self.context, source)

    def run(self, tokens, **options):
        self.driver.run(tokens, **options)
        self.publisher.publish(self.driver.manager.take_events())

    async def knows(self, *prompts, salt=""):
        """Wait until all of these prompts are known."""
        while not all(self.follower.units.num_leading(hashes_of(prompt, salt)) for prompt in prompts):
            await asyncio.sleep(0.01)


@contextmanager
def followed():
    it = Followed()
    try:
        yield it
    finally:
        it.publisher.close()
        it.context.destroy(linger=0)


A, B, C = [1] * 9, [2] * 9, [3] * 9


def test_a_follower_that_comes_late_learns_what_was_before_and_what_comes_and_forgets_at_the_end():
    async def scenario(it):
        it.run(A)
        it.run(A, salt="mine")
        task = asyncio.create_task(it.follower.run())
        await it.knows(A)
        await it.knows(A, salt="mine")
        it.run(B)
        await it.knows(A, B)
        task.cancel()
        await asyncio.wait([task])
        assert len(it.follower.units) == 0

    with followed() as it:
        asyncio.run(asyncio.wait_for(scenario(it), 20))


def test_batches_that_were_missed_are_asked_for_and_those_known_already_change_nothing():
    async def scenario(it):
        for prompt in (A, B, C):
            it.run(prompt)
        batches = []
        while len(batches) < 3:
            batches = [batch async for batch in it.follower._missed()]
        await it.follower.take(*batches[2])  # the other two were lost on the way
        await it.knows(A, B, C)
        assert it.follower._next == 3
        await it.follower.take(*batches[0])  # "all cleared" and A, once more
        await it.knows(A, B, C)

    with followed() as it:
        asyncio.run(asyncio.wait_for(scenario(it), 20))


def test_when_missed_batches_are_gone_everything_is_forgotten(monkeypatch):
    monkeypatch.setattr(kv_events, "REPLAY_BYTES", 500)

    async def scenario(it):
        it.run(A)
        ((number, batch),) = await batches_of(it, 1)
        await it.follower.take(number, batch)
        for i in range(20):
            it.run([100 + i] * 9)
        last = (await batches_of(it, 20))[-1]
        await it.follower.take(*last)
        await it.knows([119] * 9)
        assert it.follower.units.num_leading(hashes_of(A)) == 0
        assert it.follower._next == 21

    async def batches_of(it, last):
        batches = []
        while not batches or batches[-1][0] < last - 1:
            batches = [batch async for batch in it.follower._missed()]
        return batches

    with followed() as it:
        asyncio.run(asyncio.wait_for(scenario(it), 20))


def test_a_replica_that_does_not_answer_is_followed_with_what_comes(monkeypatch):
    monkeypatch.setattr("girih.server.replicas.follower.REPLAY_TIMEOUT_MS", 50)

    async def scenario(it):
        it.run(A)
        ((_, batch),) = [found async for found in it.follower._missed()] or [(0, b"")]
        it.publisher.close()
        await it.follower.take(5, batch)
        await it.knows(A)
        assert it.follower._next == 6

    with followed() as it:
        while not it.publisher._sent._batches:
            it.run(A)
        asyncio.run(asyncio.wait_for(scenario(it), 20))
