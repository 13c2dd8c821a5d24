"""The ring: every reader gets every message, of any size, whole and in order; waits end."""

import os
import random
import threading
import time

import numpy as np
import pytest

from girih.executor._frames import Message, pack
from girih.executor._ring import Ring, RingReader, RingWriter


@pytest.fixture
def ring():
    made = []

    def make(num_readers, num_bytes=4096, stop=None):
        ring = Ring.make(num_readers, num_bytes)
        writer, readers = RingWriter(ring, stop), [RingReader(ring.of_reader(i)) for i in range(num_readers)]
        made.append((ring, writer, *readers))
        return writer, readers

    yield make
    for ring, *ends in made:
        for end in ends:
            end.close()
        ring.close()


def test_all_readers_get_every_message_in_order(ring):
    writer, readers = ring(3)
    for tag in range(5):
        writer.write(pack(tag, f"message {tag}"), 1)
    for reader in readers:
        assert [(message.tag, message.value()) for message in reader.take()] == [(i, f"message {i}") for i in range(5)]
        assert reader.take() == []


def test_messages_of_all_sizes_go_through_a_ring_smaller_than_most(ring):
    writer, readers = ring(2)
    generator = random.Random(1)
    sizes = [generator.choice([0, 1, 15, 1000, 4096, 5000, 300_000]) for _ in range(40)]
    arrays = [np.random.default_rng(i).integers(0, 255, size).astype(np.uint8) for i, size in enumerate(sizes)]
    received = [[], []]

    def read(i):
        received[i] = [readers[i].receive().value() for _ in arrays]

    threads = [threading.Thread(target=read, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for tag, array in enumerate(arrays):
        writer.write(pack(tag, array), 10)
    for thread in threads:
        thread.join(10)
    for values in received:
        assert len(values) == len(arrays)
        assert all(np.array_equal(value, array) for value, array in zip(values, arrays, strict=True))


def test_a_reader_that_does_not_read_ends_the_wait_and_is_named(ring):
    writer, (reading, _) = ring(2)
    writer.write([bytes(4000)], 1)
    reading.take()
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        writer.write([bytes(5000)], 0.05)
    assert 0.04 < time.monotonic() - start < 2
    assert writer.lagging()[-1] == 1


def test_a_wait_ends_when_nobody_will_read_any_more(ring):
    stop = os.eventfd(0)
    writer, _ = ring(1, stop=stop)
    threading.Timer(0.05, os.eventfd_write, (stop, 1)).start()
    with pytest.raises(BrokenPipeError):
        writer.write([bytes(5000)], 10)
    os.close(stop)


def test_a_reader_that_waits_uses_no_processor(ring):
    writer, (reader,) = ring(1)
    threading.Timer(0.3, writer.write, (pack(7, None), 1)).start()
    start = time.thread_time()
    assert reader.receive().tag == 7
    assert time.thread_time() - start < 0.05


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.zeros(0, np.int64),
        np.float32(1.5) * np.ones(()),
        np.arange(12).reshape(3, 4)[:, ::2],
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array([True, False]),
        np.array([("a", 1)], dtype=[("name", "U1"), ("number", np.int16)]),
        np.array([None, "x"], dtype=object),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_arrive_as_they_were(array):
    header, body = split(pack(1, {"array": array, "other": 3}))
    value = Message(header, body).value()["array"]
    assert value.dtype == array.dtype
    np.testing.assert_array_equal(value, array)


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_arrays_are_aligned_and_may_be_written_to_if_they_could_be(size):
    arrays = [np.ones(size, np.uint8), np.ones(size + 3, np.uint8), np.ones(size, np.float64)]
    arrays[1].flags.writeable = False
    values = Message(*split(pack(1, arrays))).value()
    assert [value.flags.writeable for value in values] == [True, False, True]
    assert all(value.ctypes.data % 16 == 0 for value in values)


def test_large_arrays_are_written_from_where_they_are():
    array = np.ones(1 << 20, np.uint8)
    assert any(np.shares_memory(np.frombuffer(part, np.uint8), array) for part in pack(1, array) if len(part) > 1000)


def split(parts):
    """Return header and body of a packed message."""
    data = b"".join(parts)
    return data[:32], bytearray(data[32:])
