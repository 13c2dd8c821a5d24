"""Compiled products of few rows against torch's in float64, and bit for bit against themselves."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from girih.linear import cpu
from girih.linear.cpu import CpuMatrix
from girih.linear.plain import PlainMatrix


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32)).to(dtype)


@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.one_of(st.integers(0, 140), st.sampled_from([300, 2048, 2049])),
    num_columns=st.integers(1, 300),
    size=st.integers(1, 20).flatmap(lambda k: st.sampled_from([k, 16 * k])),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bias=st.booleans(),
)
def test_products_are_those_of_any_size(num_rows, num_columns, size, dtype, bias):
    x, weight = numbers(num_rows, size, dtype=dtype), numbers(num_columns, size, seed=1, dtype=dtype)
    b = numbers(num_columns, seed=2, dtype=dtype) if bias else None
    exact = x.double() @ weight.double().T + (0 if b is None else b.double())
    result = CpuMatrix(weight).product(x, b)
    assert result.dtype == dtype
    near = {"atol": 1e-3, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.06, "rtol": 0.02}
    torch.testing.assert_close(result, exact.to(dtype), **near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_beside_any_few(dtype, monkeypatch):
    monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda: False)
    matrix, x = CpuMatrix(numbers(96, 80, dtype=dtype)), numbers(cpu.FEW_ROWS, 80, seed=1, dtype=dtype)
    whole = matrix.product(x)
    for num_rows in range(1, cpu.FEW_ROWS + 1):
        assert torch.equal(matrix.product(x[:num_rows]), whole[:num_rows])
    assert torch.equal(matrix.product(x[5:6]), whole[5:6])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_beside_any_many(dtype):
    matrix, x = CpuMatrix(numbers(96, 80, dtype=dtype)), numbers(300, 80, seed=1, dtype=dtype)
    whole = matrix.product(x)
    for num_rows in (cpu.FEW_ROWS + 1, 40, 64, 65, 100, 129, 299):
        assert torch.equal(matrix.product(x[:num_rows]), whole[:num_rows])
        assert torch.equal(matrix.product(x[300 - num_rows :]), whole[300 - num_rows :])


def test_there_are_few_numbers_of_rows_that_kernels_are_made_for(monkeypatch):
    seen = set()
    multiply = cpu._multiply_part
    monkeypatch.setattr(cpu, "_multiply_part", lambda x, *rest: (seen.add(len(x)), multiply(x, *rest))[1])
    matrix = CpuMatrix(numbers(96, 80))
    for num_rows in [*range(cpu.FEW_ROWS + 1, 300), 1000, 2047, 2049, 5000]:
        assert matrix.product(numbers(num_rows, 80)).shape == (num_rows, 96)
    assert seen == {8, 16, 32, 64, 128, 256, 512, 1024, 2048}


def test_one_row_does_not_see_what_is_wrong_with_another():
    matrix, x = CpuMatrix(numbers(8, 32)), numbers(3, 32, seed=1)
    x[1, 3] = torch.nan
    result = matrix.product(x)
    assert result[1].isnan().all()
    assert torch.equal(result[::2], matrix.product(x[::2]))


@pytest.mark.parametrize("form", [PlainMatrix, CpuMatrix])
@pytest.mark.parametrize("num_rows", [1, 6, 64])
def test_a_share_of_a_sum_is_not_rounded(form, num_rows):
    x, weight = numbers(num_rows, 48, dtype=torch.bfloat16), numbers(12, 48, seed=1, dtype=torch.bfloat16)
    result = form(weight).product(x, dtype=torch.float32)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), x.double() @ weight.double().T, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_rows", [4, 40])
def test_without_bfloat16_arithmetic_sums_are_rounded_once(bias, num_rows, monkeypatch):
    monkeypatch.setattr(cpu, "FLOAT32_WEIGHT_ROWS", 5)
    monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda: False)
    x, weight = numbers(num_rows, 48, dtype=torch.bfloat16), numbers(12, 48, seed=1, dtype=torch.bfloat16)
    b = numbers(12, seed=2, dtype=torch.bfloat16) if bias else None
    exact = x.double() @ weight.double().T + (0 if b is None else b.double())
    assert torch.equal(CpuMatrix(weight).product(x, b), exact.bfloat16())


def test_rows_are_looked_up_as_they_are():
    weight = numbers(10, 32, dtype=torch.bfloat16)
    assert torch.equal(CpuMatrix(weight).rows(torch.tensor([3, 0, 3])), weight[[3, 0, 3]])
