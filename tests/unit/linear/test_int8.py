"""Products of int8 against whole numbers: exact, whatever the processor and whatever else is in the batch."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from girih.linear import int8
from girih.linear._int8_products import EXACT_COLUMNS, X_STEPS
from girih.linear.int8 import Int8Matrix, quantise
from tests.unit.linear.test_cpu import numbers


@pytest.fixture(params=["matrix unit", "any processor"], autouse=True)
def processor(request, monkeypatch):
    """Compute with the matrix unit, if there is one, and without."""
    if request.param == "any processor":
        monkeypatch.setattr(int8, "multiplies_int8", lambda: False)
    elif not int8.multiplies_int8():
        pytest.skip("this processor has no matrix unit (AMX)")


def steps(weight):
    """Return a matrix' whole numbers and scales, made by numpy in the plainest way."""
    scales = np.abs(weight).max(axis=1) / np.float32(127)
    return np.rint(weight / np.where(scales > 0, scales, 1)[:, None]).astype(np.int64), scales


def expected(x, weight):
    """Return products of rounded numbers: exact sums of up to 1024, in float32 from there, in the kernel's order."""
    q, w_scales = steps(weight)
    top = np.abs(x).max(axis=1)
    inverse = np.where(top > 0, np.float32(X_STEPS) / np.where(top > 0, top, 1), 0).astype(np.float32)
    rows, sums = np.rint(x * inverse[:, None]).astype(np.int64), np.float32(0)
    for first in range(0, x.shape[1], EXACT_COLUMNS):
        part = slice(first, first + EXACT_COLUMNS)
        sums = sums + (rows[:, part] @ q[:, part].T).astype(np.float32)
    return sums * w_scales * (top / np.float32(X_STEPS))[:, None]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 70), st.integers(1, 200), st.integers(1, 150) | st.integers(1000, 2100), st.integers(0, 99))
def test_products_are_those_of_the_rounded_numbers_to_the_bit(num_rows, num_columns, size, seed):
    x, weight = numbers(num_rows, size, seed=seed), numbers(num_columns, size, seed=seed + 100)
    result = Int8Matrix(weight).product(x)
    assert np.array_equal(result.numpy(), expected(x.numpy(), weight.numpy()))


@pytest.mark.parametrize("size", [64, 1536, 5000])
@pytest.mark.parametrize(("x_sign", "weight_sign"), [(1, 1), (1, -1), (-1, 1), (-1, -1)])
def test_nothing_saturates_where_all_numbers_are_as_large_as_they_can_be(size, x_sign, weight_sign):
    x, weight = torch.full((5, size), 3.0 * x_sign), torch.full((70, size), 0.5 * weight_sign)
    torch.testing.assert_close(Int8Matrix(weight).product(x), x @ weight.T, rtol=1e-6, atol=0)


def test_a_row_has_the_same_bits_alone_and_in_any_batch():
    matrix, x = Int8Matrix(numbers(130, 96)), numbers(150, 96, seed=1)
    x[7] *= 100
    x[9] = 0
    whole = matrix.product(x)
    for num_rows in (1, 2, 3, 4, 31, 64, 65, 149):
        assert torch.equal(matrix.product(x[:num_rows]), whole[:num_rows])
    for row in (0, 7, 9, 149):
        assert torch.equal(matrix.product(x[row : row + 1]), whole[row : row + 1])
    assert not whole[9].any()


def test_one_large_row_takes_nothing_from_the_others():
    weight, x = numbers(64, 256), numbers(16, 256, seed=1)
    x[3] *= 100
    exact = x @ weight.T
    error = (Int8Matrix(weight).product(x) - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < 0.02


@pytest.mark.parametrize("number", [1e-29, 1e-35, 1e-38, 1e-44])
def test_a_row_of_tiny_numbers_gives_no_larger_ones(number):
    matrix, x = Int8Matrix(torch.ones(32, 64)), torch.zeros(5, 64)
    x[:, 0] = number
    torch.testing.assert_close(matrix.product(x), x[:, :1].expand(5, 32), rtol=1e-3, atol=1e-30)
    assert matrix.product(x).abs().max() <= number * 1.001


def test_weights_too_small_for_a_scale_of_their_own_keep_their_signs():
    smallest = 2.0**-149
    weight = torch.zeros(4, 16)
    weight[:, 0], weight[:, 1] = torch.tensor([64.0, 100.0, 190.0, 1000.0]) * smallest, -64 * smallest
    rows = Int8Matrix(weight).rows(torch.arange(4))
    assert ((rows - weight).abs() <= 64 * smallest).all()
    assert (rows[:, 0] > 0).all()
    assert (rows[:, 1] <= 0).all()


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_gives_no_number_and_harms_no_other(wrong):
    matrix, x = Int8Matrix(numbers(20, 48)), numbers(3, 48, seed=1)
    x[1, 5] = wrong
    result = matrix.product(x)
    assert result[1].isnan().all()
    assert torch.equal(result[::2], matrix.product(x[::2]))


def test_bias_and_dtypes_are_those_of_other_forms():
    weight, x = numbers(20, 48, dtype=torch.bfloat16), numbers(3, 48, seed=1, dtype=torch.bfloat16)
    bias, matrix = numbers(20, seed=2, dtype=torch.bfloat16), Int8Matrix(weight)
    exact = matrix.product(x, dtype=torch.float32)
    assert exact.dtype == torch.float32
    assert torch.equal(matrix.product(x, bias), (exact + bias).bfloat16())


def test_rows_looked_up_are_those_that_are_multiplied():
    weight = numbers(100, 40, dtype=torch.bfloat16)
    rows = Int8Matrix(weight).rows(torch.tensor([99, 0, 63, 64]))
    q, scales = steps(weight.float().numpy())
    picked = [99, 0, 63, 64]
    assert rows.dtype == torch.bfloat16
    assert torch.equal(rows, torch.from_numpy(q[picked].astype(np.float32) * scales[picked, None]).bfloat16())


def test_halves_of_whole_numbers_are_those_numbers():
    numbers_of = numbers(5, 48)
    whole, scales = quantise(numbers_of, 64, in_halves=False)
    halves, same_scales = quantise(numbers_of, 64, in_halves=True)
    upper, lower = halves.view(torch.int8).view(5, 2, 64).unbind(1)
    assert torch.equal(upper.int() * 256 + lower.view(torch.uint8).int(), whole.int())
    assert torch.equal(scales, same_scales)
    assert not whole[:, 48:].any()


def test_rounding_is_to_the_nearest_and_ties_to_the_even_number():
    numbers = torch.zeros(1, 16)
    numbers[0, :6] = torch.tensor([16383.0, -16383.0, 0.5, 1.5, -2.5, 0.4])
    whole, scales = quantise(numbers, 16, in_halves=False)
    assert whole[0, :6].tolist() == [16383, -16383, 0, 2, -2, 0]
    assert scales.tolist() == [1.0]
