"""The snapshot that the live page reads: its bytes say what the engine showed."""

import dataclasses
import gzip
import json
import struct

import numpy as np
from pool_pictures import EMPTY_STATS, view_of

from girih.kv.pool_map import CACHED, FREE, NOBODY, ClassMap, GroupMap
from girih.server.snapshot import SHARED, write_snapshot


def read(body):
    """Return the JSON, and for each stage class its owners and {group: codes}; as the page does."""
    data = gzip.decompress(body)
    (length,) = struct.unpack_from("<I", data)
    head, offset, pools = json.loads(data[4 : 4 + length]), 4 + length, []

    def take(dtype, *shape):
        nonlocal offset
        array = np.frombuffer(data, dtype, int(np.prod(shape)), offset).reshape(shape)
        offset += array.nbytes
        return array

    for pool in head["classes"]:
        owners = take("<i2", pool["num_slabs"])
        groups = {g["group"]: take("<u2", g["num_slabs"], g["pages_per_slab"]) for g in pool["groups"]}
        pools.append((owners, groups))
    assert offset == len(data)
    return head, pools


def pages(rows, holders):
    return GroupMap(np.array(rows, dtype=np.int32), np.array(holders, dtype=np.uint16))


def test_every_page_has_the_code_of_its_state_or_of_its_request():
    first = ClassMap(
        np.array([0, NOBODY, 1, 0], dtype=np.int16),
        {0: pages([[7, 7], [CACHED, FREE]], [[1, 2], [0, 0]]), 1: pages([[2, 9, FREE]], [[1, 3, 0]])},
    )
    second = ClassMap(np.array([NOBODY, 2], dtype=np.int16), {2: pages([[2]], [[1]])})
    view = view_of((first, second), request_ids=("40", "41"), rows=[2, 7])
    head, pools = read(write_snapshot(view, {"time_s": 1.5}))
    assert head["time_s"] == 1.5
    assert head["stats"] == json.loads(json.dumps(dataclasses.asdict(EMPTY_STATS)))
    assert head["requests"] == [["40", 10, 2, 12, 4], ["41", 11, 2, 13, 4]]
    assert pools[0][0].tolist() == [0, -1, 1, 0]
    assert pools[0][1][0].tolist() == [[4, 4 | SHARED], [1, 0]]
    assert pools[0][1][1].tolist() == [[3, 2 | SHARED, 0]]  # row 9 is of a request that is just ending
    assert pools[1][0].tolist() == [-1, 2]
    assert pools[1][1][2].tolist() == [[3]]


def test_an_idle_pool_and_a_model_without_a_cache_can_be_written():
    idle = ClassMap(np.full(3, NOBODY, dtype=np.int16), {0: pages(np.empty((0, 4)), np.empty((0, 4)))})
    head, pools = read(write_snapshot(view_of((idle,)), {}))
    assert head["requests"] == []
    assert pools[0][0].tolist() == [-1, -1, -1]
    assert pools[0][1][0].shape == (0, 4)
    assert read(write_snapshot(view_of(()), {}))[1] == []
