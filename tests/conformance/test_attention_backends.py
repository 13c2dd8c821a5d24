"""Every attention backend against dense attention written out, over scattered pages in a pool full of NaN."""

import pytest
import torch

from girih import plugins
from tests.dense_attention import ROWS, paged_cache, run_case

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


@pytest.mark.parametrize("v_head_size", [1, 4, 12])
@pytest.mark.parametrize("quantised", [False, True])
def test_values_may_be_of_another_size_than_keys(backend, quantised, v_head_size):
    actual, expected = run_case(backend, ROWS["mixed"], window=6, v_head_size=v_head_size, quantised=quantised)
    assert actual.shape[-1] == v_head_size
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_an_int8_cache_holds_each_token_and_head_in_steps_of_its_own_scale(backend, rows, window):
    actual, expected = run_case(backend, rows, window=window, quantised=True)
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=1e-5)


def test_an_int8_cache_costs_little_exactness(backend):
    """Scores move by less than 0.3 * size * max |q| max |k| / 254, here below 0.1; outputs by about a hundredth."""
    quantised, _ = run_case(backend, ROWS["mixed"], quantised=True)
    _, exact = run_case(backend, ROWS["mixed"])
    assert 1e-4 < (quantised - exact).abs().max() < 0.03


def test_an_int8_cache_serves_bfloat16_queries(backend):
    actual, expected = run_case(backend, ROWS["mixed"], dtype=torch.bfloat16, quantised=True)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_is_off_by_at_most_half_a_step(backend, dtype):
    cache = paged_cache(2, 16, 3, 8, dtype=dtype, quantised=True)
    x = torch.randn(16, 3, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0] = 0
    x[1] *= 1e-30
    x[2] *= 1e30
    backend.write(cache, x, -x, torch.arange(16) + 16)
    for name, truth in (("key", x), ("value", -x)):
        scale = cache.tensors[f"{name}_scale"][1].unsqueeze(-1)
        torch.testing.assert_close(scale, truth.abs().amax(-1, keepdim=True).float() / 127, atol=0, rtol=1e-6)
        error = (cache.tensors[name][1] * scale - truth.float()).abs()
        assert (error <= 0.5001 * scale).all()
