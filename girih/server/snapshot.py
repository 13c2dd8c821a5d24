"""A picture of the pool as bytes that a browser reads without work: arrays, compressed.

    uint32, little endian     length of the JSON text, with the spaces that make it even
    JSON                      the facts given, "stats", "requests", and "classes": what the arrays are
    for each stage class      int16 [slabs]: the group that has borrowed each, -1 for none
        for each of its groups    uint16 [its slabs, pages per slab]: a code per page, slabs in order

Codes: 0 nothing, 1 cached only, 2 held by a request that is just ending, 3 + i held by requests[i] of the JSON; with
`SHARED` added if several hold it.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from girih.engine.pool_view import PoolView
from girih.kv.pool_map import CACHED, FREE, GroupMap

NOTHING_CODE, CACHED_CODE, ENDING_CODE, FIRST_REQUEST_CODE = range(4)
SHARED = 1 << 15

_FASTEST = 1
"""The level of compression: neighbours are mostly alike, so that more effort wins little."""


def write_snapshot(view: PoolView, facts: Mapping[str, Any]) -> bytes:
    """Write what the engine showed, as in the module's first lines, compressed by gzip.

    Args:
        view: the pool and the requests.
        facts: more values for the JSON.
    """
    arrays, classes = [], []
    codes = _code_of_rows(view)
    for pool in view.classes:
        arrays.append(pool.owners.astype("<i2"))
        groups = []
        for group, pages in pool.groups.items():
            arrays.append(_codes(codes, pages))
            groups.append({"group": group, "num_slabs": pages.rows.shape[0], "pages_per_slab": pages.rows.shape[1]})
        classes.append({"num_slabs": len(pool.owners), "groups": groups})
    counts = (view.num_prompt_tokens, view.num_output_tokens, view.num_computed_tokens, view.num_cached_tokens)
    requests = zip(view.request_ids, *(count.tolist() for count in counts), strict=True)
    head = {**facts, "stats": dataclasses.asdict(view.stats), "requests": list(requests), "classes": classes}
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (len(text) % 2)
    body = b"".join([struct.pack("<I", len(text)), text, *(array.tobytes() for array in arrays)])
    return gzip.compress(body, _FASTEST, mtime=0)


def _code_of_rows(view: PoolView) -> np.ndarray:
    # uint16 [rows + 2]: the code of what `GroupMap.rows` says, which begins at CACHED = -2
    last = max(
        (int(pages.rows.max(initial=FREE)) for pool in view.classes for pages in pool.groups.values()), default=0
    )
    codes = np.full(max(last, int(view.rows.max(initial=0))) + 1 - CACHED, ENDING_CODE, dtype="<u2")
    codes[view.rows - CACHED] = np.arange(len(view.rows)) + FIRST_REQUEST_CODE
    codes[CACHED - CACHED], codes[FREE - CACHED] = CACHED_CODE, NOTHING_CODE
    return codes


def _codes(code_of_rows: np.ndarray, pages: GroupMap) -> np.ndarray:
    codes = code_of_rows[pages.rows - CACHED]
    codes[pages.num_holders > 1] |= SHARED
    return codes
