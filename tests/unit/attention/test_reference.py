"""How the reference backend cuts a step into batches and tiles; its results are in tests/conformance."""

import numpy as np
import torch

from girih.attention import GroupMetadata, KVCacheView, reference
from tests.dense_attention import ROWS, paged_cache, run_case


def test_small_tiles_and_batches_give_the_same(monkeypatch):
    """Long contexts are cut into tiles of queries, many rows into batches; neither may change a result."""
    whole, _ = run_case(reference, ROWS["mixed"] + [(3, 50)], window=7)
    monkeypatch.setattr(reference, "MASK_ELEMENTS", 1)
    monkeypatch.setattr(reference, "DECODE_GATHER_BYTES", 1)
    cut, expected = run_case(reference, ROWS["mixed"] + [(3, 50)], window=7)
    torch.testing.assert_close(cut, whole, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(cut, expected, atol=2e-6, rtol=1e-5)


def test_decode_batches_pad_at_most_to_twice_a_row():
    rows = [(length, 1) for length in (3, 900, 1000, 20, 15, 400)]
    cache = KVCacheView({"key": torch.zeros(1, 4, 1, 1), "value": torch.zeros(1, 4, 1, 1)}, 0, 4)
    metadata = GroupMetadata(
        np.arange(len(rows) + 1), np.array([c for c, _ in rows]), np.zeros((len(rows), 251), np.int32), torch.zeros(0)
    )
    batches = reference.prepare(metadata, cache, None).decodes
    assert sorted(torch.cat([batch.tokens for batch in batches]).tolist()) == list(range(len(rows)))
    assert [batch.tokens.tolist() for batch in batches] == [[2, 1], [5], [3, 4], [0]]


def test_decode_batches_of_an_int8_cache_are_as_small_as_its_float32_values_need(monkeypatch):
    monkeypatch.setattr(
        reference, "DECODE_GATHER_BYTES", 3 * 4 * 2 * 8 * torch.float32.itemsize
    )  # 3 pages, turned back
    cache = paged_cache(5, 4, 2, 4, dtype=torch.float32, v_head_size=8, quantised=True)
    metadata = GroupMetadata(np.arange(8), np.zeros(7, np.int64), np.zeros((7, 1), np.int32), torch.zeros(0))
    batches = reference.prepare(metadata, cache, None).decodes
    assert [batch.tokens.numel() for batch in batches] == [3, 3, 1]
