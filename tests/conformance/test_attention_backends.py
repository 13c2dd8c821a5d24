"""Every attention backend against dense attention written out, over scattered pages in a pool full of NaN."""

import pytest
import torch

from girih import plugins
from tests.dense_attention import ROWS, run_case

BACKENDS = plugins.available("girih.attention")


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Each backend in turn."""
    return plugins.load("girih.attention", request.param, what="attention backend")


def test_it_declares_its_block_sizes(backend):
    assert backend.BLOCK_SIZE_MULTIPLE >= 1


@pytest.mark.parametrize("window", [None, 1, 3, 4, 5, 8, 100])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_matches_dense_attention_and_never_reads_stale_bytes(backend, rows, window):
    actual, expected = run_case(backend, rows, window=window)
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (6, 6), (6, 1), (6, 3)])
def test_every_head_count_and_block_size(backend, num_heads, num_kv_heads, block_size):
    actual, expected = run_case(
        backend, ROWS["mixed"], num_heads=num_heads, num_kv_heads=num_kv_heads, block_size=block_size, window=6
    )
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=1e-5)


def test_bfloat16_stays_within_its_rounding(backend):
    actual, expected = run_case(backend, ROWS["mixed"], dtype=torch.bfloat16)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), expected, atol=2e-2, rtol=2e-2)
