"""The published events, over real sockets and read by a decoder written from vLLM's schema alone."""

import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from kv_driver import SECRET, KVDriver, listed_pages, make_config

from girih.errors import ConfigError
from girih.kv.hashing import TokenHasher
from girih.kv.specs.chunked_local import ChunkedLocalRetention
from girih.kv.specs.full_attention import FullAttentionRetention
from girih.kv.specs.sliding_window import SlidingWindowRetention
from girih.kv.specs.state import StateRetention
from girih.server.kv_event_format import AllBlocksCleared, BlockRemoved, write_events
from girih.server.kv_events import Backlog, KVEventPublisher, SentBatches, is_ours

FULL, WINDOW, STATE = FullAttentionRetention(), SlidingWindowRetention(9), StateRetention()
TIMEOUT_MS = 10_000
LAST = 99_999
"""A token of the last request of a test."""


# vLLM 0.32's schema: names, order, defaults and tags; nothing unknown is let through
class KVCacheEvent(msgspec.Struct, omit_defaults=True, tag=True, forbid_unknown_fields=True):
    pass


class BlockStored(KVCacheEvent, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class Removed(KVCacheEvent, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class Cleared(KVCacheEvent, tag="AllBlocksCleared"):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | Removed | Cleared]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(KVEventBatch).decode


class Router:
    """Knows of an engine's cache what the wire says."""

    def __init__(self):
        self.blocks: dict[tuple[int, int], tuple] = {}
        """(group, hash) -> all tokens up to the block's end, as far as they are known."""
        self.tokens_of: dict[int, tuple] = {}
        self.num_cleared = 0

    def read(self, batch: KVEventBatch) -> None:
        for event in batch.events:
            match event:
                case BlockStored():
                    self._store(event)
                case Removed():
                    assert event.medium == "GPU"
                    for block_hash in event.block_hashes:
                        self.blocks.pop((event.group_idx, block_hash), None)
                case Cleared():
                    self.blocks.clear()
                    self.num_cleared += 1

    def _store(self, event: BlockStored) -> None:
        size = event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        assert (event.lora_id, event.lora_name, event.medium) == (None, None, "GPU")
        before = () if event.parent_block_hash is None else self.tokens_of[event.parent_block_hash]
        for i, block_hash in enumerate(event.block_hashes):
            assert 0 <= block_hash < 1 << 64
            before = (*before, *event.token_ids[i * size : (i + 1) * size])
            self.tokens_of[block_hash] = self.blocks[event.group_idx, block_hash] = before


@pytest.fixture
def start():
    """Make a publisher, on free ports."""
    publishers = []

    def make(**options):
        free = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0"}
        publishers.append(KVEventPublisher(**{**free, **options}))
        return publishers[-1]

    yield make
    for publisher in publishers:
        publisher.close()


@pytest.fixture
def connect():
    context = zmq.Context()

    def make(kind, endpoint, topic=b""):
        opened = context.socket(kind)
        opened.rcvtimeo = TIMEOUT_MS
        if kind == zmq.SUB:
            opened.subscribe(topic)
        opened.connect(endpoint)
        return opened

    yield make
    context.destroy(linger=0)


def make_driver(*groups, num_slabs=12, **options):
    return KVDriver(make_config(num_slabs, groups), log_events=True, **options)


def subscribe(publisher, connect, driver, topic=b""):
    """Return a subscriber to whom messages come: until its subscription has arrived, none do."""
    listener = connect(zmq.SUB, publisher.endpoint, topic)
    driver.manager.reset_prefix_cache()
    hello = driver.manager.take_events()  # all cleared
    publisher.publish(hello)
    while not listener.poll(50):
        publisher.publish(hello)
    return listener


def messages(listener):
    """Yield (topic, number, batch) up to the one with the token `LAST`."""
    is_last = False
    while not is_last:
        topic, number, payload = listener.recv_multipart()
        batch = decode(payload)
        yield topic, int.from_bytes(number, "big"), batch
        is_last = any(isinstance(event, BlockStored) and LAST in event.token_ids for event in batch.events)


def publish_work(publisher, driver):
    """Run some requests; returns how many batches were published."""
    random, count = np.random.default_rng(0), 0
    for _ in range(30):
        length, branch = random.integers(1, 40), random.integers(1, 40)
        driver.run([i if i < branch else 1000 + branch + i for i in range(length)], num_new=3)
        events = driver.manager.take_events()
        publisher.publish(events)
        count += bool(events)
    return count


def missed(replay, first):
    """Ask for batches from a number on."""
    replay.send_multipart([b"", first.to_bytes(8, "big")])
    found = []
    while True:
        empty, topic, number, payload = replay.recv_multipart()
        assert empty == b""
        if number == (-1).to_bytes(8, "big", signed=True):
            assert (topic, payload) == (b"", b"")
            return found
        found.append((topic, int.from_bytes(number, "big"), decode(payload)))


def missed_once_sent(replay, first, count):
    """Ask until the publisher's thread has sent so many of them."""
    for _ in range(TIMEOUT_MS // 10):
        batches = missed(replay, first)
        if len(batches) >= count:
            break
        time.sleep(0.01)
    assert len(batches) == count
    return batches


def assert_knows_what_can_be_found(router, driver, sequences):
    expected = {}
    for tokens in sequences:
        pages, size = listed_pages(driver.manager, tokens), driver.manager.unit
        for unit, group in np.argwhere(pages > 0).tolist():
            expected[group, tuple(tokens[: (unit + 1) * size])] = None
    told = {(group, tokens): None for (group, _), tokens in router.blocks.items()}
    assert told == expected
    assert len(told) == len(router.blocks)


@pytest.mark.parametrize("groups", [[(FULL, 2)], [(FULL, 3), (WINDOW, 2)]], ids=["full", "window"])
def test_a_router_that_reads_the_schema_knows_what_can_be_found(start, connect, groups):
    driver, sequences = make_driver(*groups), []
    publisher = start(topic="kv@pod@model", data_parallel_rank=3)
    listener, router = subscribe(publisher, connect, driver, b"kv@"), Router()
    free, numbers = driver.free, []
    driver.free = lambda row: (sequences.append(list(driver.rows[row])), free(row))
    publish_work(publisher, driver)
    driver.run([LAST] * 8)
    publisher.publish(driver.manager.take_events())
    for topic, number, batch in messages(listener):
        assert (topic, batch.data_parallel_rank) == (b"kv@pod@model", 3)
        numbers.append(number)
        router.read(batch)
    assert numbers == [*range(numbers[0], numbers[0] + len(numbers))]
    assert driver.manager.stats().pages_evicted > 0
    assert_knows_what_can_be_found(router, driver, sequences)


def test_missed_batches_are_sent_again(start, connect):
    driver, router = make_driver((FULL, 2)), Router()
    publisher = start(topic="t")
    count = publish_work(publisher, driver)
    replay = connect(zmq.DEALER, publisher.replay_endpoint)
    batches = missed_once_sent(replay, 0, count)
    assert [number for _, number, _ in batches] == [*range(count)]
    assert batches[0][0] == b"t"
    for _, _, batch in batches:
        router.read(batch)
    assert router.num_cleared == 1
    assert len(router.blocks) == (driver.manager._state.log.depths[driver.manager._state.prefix_index.slots] > 0).sum()
    assert [number for _, number, _ in missed(replay, count - 2)] == [count - 2, count - 1]
    assert missed(replay, count) == []


def test_a_request_that_makes_no_sense_ends_nothing(start, connect):
    driver = make_driver((FULL, 2))
    publisher = start()
    replay = connect(zmq.DEALER, publisher.replay_endpoint)
    for parts in ([b""], [b"", b"short"], [b"x", bytes(8)], [b"", bytes(8), b"more"]):
        replay.send_multipart(parts)
    publisher.publish(driver.manager.take_events())
    ((_, _, batch),) = missed_once_sent(replay, 0, 1)
    assert isinstance(batch.events[0], Cleared)


def test_a_chain_is_one_event_and_what_goes_together_is_one_too():
    driver = make_driver((FULL, 2), (WINDOW, 2))
    assert write_events(driver.manager.take_events()) == [AllBlocksCleared()]
    driver.add(range(17))
    driver.step()
    first, second = write_events(driver.manager.take_events())
    assert (first.group_idx, first.kv_cache_spec_kind, first.kv_cache_spec_sliding_window) == (
        0,
        "full_attention",
        None,
    )
    assert (second.group_idx, second.kv_cache_spec_kind, second.kv_cache_spec_sliding_window) == (
        1,
        "sliding_window",
        9,
    )
    assert first.token_ids == second.token_ids == [*range(16)]
    assert (first.block_size, len(first.block_hashes), first.parent_block_hash) == (4, 4, None)
    driver.add([*range(16), 90, 91, 92, 93, 94])
    driver.step()
    (more, _) = write_events(driver.manager.take_events())
    assert (more.token_ids, more.parent_block_hash) == ([90, 91, 92, 93], first.block_hashes[3])
    for row in list(driver.rows):
        driver.free(row)
    driver.manager.take_events()
    driver.run(range(200, 240), num_new=12)
    removed = [event for event in write_events(driver.manager.take_events()) if isinstance(event, BlockRemoved)]
    assert sum(len(event.block_hashes) for event in removed) > len(removed) > 0


def test_groups_of_every_kind_have_vllms_names():
    driver = make_driver((STATE, 1), (ChunkedLocalRetention(8), 2))
    driver.run(range(17))
    stored = [event for event in write_events(driver.manager.take_events()) if not isinstance(event, AllBlocksCleared)]
    kinds = {event.group_idx: (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) for event in stored}
    assert kinds == {0: ("mamba", None), 1: ("chunked_local_attention", None)}


def test_nothing_of_salted_requests_is_sent(start, connect):
    driver = make_driver((FULL, 2), num_slabs=6)
    write_events(driver.manager.take_events())
    for i in range(5):
        driver.run(range(30 * i, 30 * i + 20), salt="a secret")
    assert driver.manager.stats().pages_evicted > 0
    assert write_events(driver.manager.take_events()) == []
    driver.run(range(8))
    (stored,) = [event for event in write_events(driver.manager.take_events()) if not isinstance(event, BlockRemoved)]
    assert stored.token_ids == [*range(8)]


def test_with_hashes_alone_units_of_every_request_are_told_and_no_token():
    driver = make_driver((FULL, 2))
    hasher = TokenHasher(4, SECRET)
    driver.manager.take_events()
    for salt in ("", "a secret"):
        driver.run(range(8), salt=salt)
        (stored,) = write_events(driver.manager.take_events(), tells_tokens=False)
        keys = hasher.chain(hasher.root(salt), np.arange(8, dtype=np.int32))
        assert (stored.block_hashes, stored.token_ids) == (keys[:, 0].tolist(), [])


def test_when_too_much_waits_listeners_begin_anew():
    driver, backlog = make_driver((FULL, 2)), Backlog(2)
    batches = []
    for i in range(4):
        driver.run(range(20 * i, 20 * i + 8))
        batches.append(driver.manager.take_events())
        backlog.put(batches[-1])
    left = [backlog.take(), backlog.take()]
    assert backlog.take() is None
    assert [events.is_cleared for events in left] == [True, False]
    assert np.array_equal(left[0].keys, batches[2].keys)
    backlog.close()
    backlog.put(batches[0])
    assert backlog.is_finished


def test_of_what_was_sent_the_newest_bytes_are_kept():
    sent = SentBatches(10)
    for number in range(5):
        sent.add(number.to_bytes(8, "big"), bytes(4))
    assert [int.from_bytes(number, "big") for number, _ in sent.since(bytes(8))] == [3, 4]
    assert [int.from_bytes(number, "big") for number, _ in sent.since((4).to_bytes(8, "big"))] == [4]


@pytest.mark.parametrize(
    ("endpoint", "listens"),
    [("tcp://*:5557", True), ("tcp://0.0.0.0:5557", True), ("tcp://127.0.0.1:1", True), ("tcp://[::1]:1", True),
     ("ipc:///tmp/x", True), ("tcp://router:5557", False), ("tcp://10.0.0.7:5557", False)],
)  # fmt: skip
def test_it_listens_at_addresses_of_this_machine_and_connects_to_others(endpoint, listens):
    assert is_ours(endpoint) == listens


def test_a_router_that_listens_is_connected_to(start, connect):
    context = zmq.Context()
    listener = context.socket(zmq.SUB)
    listener.subscribe(b"")
    port = listener.bind_to_random_port("tcp://127.0.0.1")
    driver = make_driver((FULL, 2))
    publisher = start(endpoint=f"tcp://localhost:{port}", replay_endpoint=None)
    hello = driver.manager.take_events()
    while not listener.poll(50):
        publisher.publish(hello)
    assert isinstance(decode(listener.recv_multipart()[2]).events[0], Cleared)
    context.destroy(linger=0)


@pytest.mark.parametrize("endpoint", ["tcp://*", "nonsense", "tcp://127.0.0.1:port"])
def test_an_endpoint_that_cannot_be_used_is_named(start, endpoint):
    with pytest.raises(ConfigError, match=f"endpoint '{endpoint.replace('*', '.')}' for KV events"):
        start(endpoint=endpoint)


def test_a_port_that_is_taken_is_told_and_nothing_is_left_running(start):
    taken = start().endpoint
    before = threading.active_count()
    with pytest.raises(ConfigError, match="in use"):
        start(endpoint=taken)
    assert threading.active_count() == before


def test_the_end_comes_after_what_waits(start, connect):
    driver = make_driver((FULL, 2))
    publisher = start()
    listener = subscribe(publisher, connect, driver)
    driver.run([LAST] * 8)
    publisher.publish(driver.manager.take_events())
    publisher.close()
    publisher.close()
    publisher.publish(driver.manager.take_events())
    assert [*messages(listener)]
