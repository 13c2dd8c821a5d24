"""The operations of a layer, compiled, against torch: odd sizes, any rows and threads, NaN, every dtype."""

import pytest
import torch
from torch import nn

from girih.layers.norm import GemmaRMSNorm, RMSNorm
from girih.layers.operations import compiled, plain
from girih.layers.rotary import RotaryEmbedding

ROWS = (1, 3, 40)
DTYPES = [torch.float32, torch.bfloat16]


def assert_close(ours, theirs):
    """Compare up to the order of sums, and in bfloat16 up to the rare number that then lies on the other side."""
    if ours.dtype == torch.float32:
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-6)
    else:
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1 / 64)
        assert ((ours != theirs) & (theirs.abs() > 1e-3)).float().mean() < 0.01  # gelu of torch is less exact below


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_norm(kind, size, seed=0, dtype=torch.float32):
    norm = kind(size, 1e-3, dtype)
    norm.weight = nn.Parameter(randn(size, seed=seed, dtype=dtype), requires_grad=False)
    return norm


def add_norm(operations, x, delta, after, norm):
    """Return the stream and what the norm makes of it; the arguments stay as they are."""
    return operations.add_norm(x.clone(), delta, after, norm, torch.empty_like(x))


def split_heads(operations, merged, heads, head_dim, norms):
    """Return queries, keys and values one behind the other."""
    cos_sin = RotaryEmbedding(head_dim, rope_type="default", rope_theta=100.0).cos_sin(
        torch.arange(merged.shape[0]) * 7, merged.dtype
    )
    parts = operations.split_heads(merged.clone(), heads, head_dim, cos_sin, norms)
    assert [part.shape for part in parts] == [(merged.shape[0], num, head_dim) for num in heads]
    return torch.cat(parts, dim=1)


@pytest.fixture(params=[1, 2, 5])
def threads(request, monkeypatch):
    """Let compiled operations run on so many threads, however little there is to do."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr("girih.kernels.threads.THREAD_ELEMENTS", 1)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("size", [1, 15, 16, 24, 576])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", [RMSNorm, GemmaRMSNorm])
@pytest.mark.parametrize("dtype", DTYPES)
def test_adding_and_normalising_is_what_torch_does(dtype, kind, rows, size, threads):
    x, delta = randn(rows, size, dtype=dtype), randn(rows, size, seed=1, dtype=dtype)
    norm, after = make_norm(kind, size, seed=2, dtype=dtype), make_norm(kind, size, seed=3, dtype=dtype)
    for given in ((None, None), (delta, None), (delta, after)):
        (ours, ours_normed), (theirs, theirs_normed) = (
            add_norm(operations, x, *given, norm) for operations in (compiled, plain)
        )
        assert_close(ours, theirs)
        assert_close(ours_normed, theirs_normed)
        if given[1] is None:
            assert torch.equal(ours, theirs)
        else:
            assert torch.equal(compiled.add(x.clone(), *given), ours)


@pytest.mark.parametrize(("heads", "head_dim"), [((4, 2, 2), 6), ((9, 3, 3), 64), ((4, 1, 1), 256), ((1, 1, 1), 40)])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_turned_as_torch_turns_them(dtype, rows, heads, head_dim, threads):
    merged = randn(rows, sum(heads) * head_dim, dtype=dtype)
    assert torch.equal(*(split_heads(operations, merged, heads, head_dim, None) for operations in (compiled, plain)))
    norms = tuple(make_norm(GemmaRMSNorm, head_dim, seed=seed, dtype=dtype) for seed in (1, 2))
    ours, theirs = (split_heads(operations, merged, heads, head_dim, norms) for operations in (compiled, plain))
    assert_close(ours, theirs)


@pytest.mark.parametrize("size", [1, 15, 16, 24, 1536])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("activation", plain.ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_are_those_of_torch(dtype, activation, rows, size, threads):
    merged = randn(rows, 2 * size, dtype=dtype) * 4
    assert_close(compiled.gate(activation, merged), plain.gate(activation, merged))


@pytest.mark.parametrize("activation", plain.ACTIVATIONS)
def test_gates_are_right_over_the_whole_range(activation):
    gate = torch.cat((torch.linspace(-300, 300, 1201), torch.tensor([-1e30, 1e30, 0.0])))
    merged = torch.stack((gate, torch.ones_like(gate)), dim=1)
    exact = plain.gate(activation, merged.double())
    torch.testing.assert_close(compiled.gate(activation, merged).double(), exact, atol=1e-6, rtol=1e-6)


def everything(rows):
    """Return what each operation makes of rows of 24, side by side."""
    dtype = rows.dtype
    norms = make_norm(RMSNorm, 4, seed=1, dtype=dtype), make_norm(GemmaRMSNorm, 4, seed=2, dtype=dtype)
    after, norm = make_norm(GemmaRMSNorm, 24, seed=3, dtype=dtype), make_norm(RMSNorm, 24, seed=4, dtype=dtype)
    cos_sin = torch.ones(rows.shape[0], 1, 4, dtype=dtype), torch.zeros(rows.shape[0], 1, 4, dtype=dtype)
    parts = compiled.split_heads(rows.clone(), (2, 2, 2), 4, cos_sin, norms)
    gates = [compiled.gate(activation, rows) for activation in plain.ACTIVATIONS]
    return torch.cat((*gates, *add_norm(compiled, rows, rows, after, norm), torch.cat(parts, dim=1).flatten(1)), dim=1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_among_others(dtype, threads):
    rows = randn(40, 24, dtype=dtype)
    together = everything(rows)
    assert torch.equal(together, torch.cat([everything(row[None]) for row in rows]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_nan_and_in_its_row(dtype, threads):
    rows = randn(9, 24, dtype=dtype)
    rows[4] = torch.nan
    result = everything(rows)
    assert result[4].isnan().all()
    assert not result[[0, 1, 2, 3, 5, 6, 7, 8]].isnan().any()


def test_no_row_is_no_work():
    assert everything(randn(0, 24)).shape[0] == 0


def test_other_dtypes_and_activations_are_left_to_torch(monkeypatch):
    rows, norm = randn(5, 24, dtype=torch.float64), make_norm(RMSNorm, 24, dtype=torch.float64)
    for ours, theirs in zip(*(add_norm(o, rows, rows, norm, norm) for o in (compiled, plain)), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(*(split_heads(operations, rows, (2, 2, 2), 4, None) for operations in (compiled, plain)))
    monkeypatch.setitem(plain.ACTIVATIONS, "relu", nn.functional.relu)
    assert torch.equal(*(operations.gate("relu", rows.float()) for operations in (compiled, plain)))
