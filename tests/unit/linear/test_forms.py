"""What every compiled form of a weight must do."""

import pytest
import torch

from girih.linear.cpu import CpuMatrix
from girih.linear.int8 import Int8Matrix
from tests.unit.linear.test_cpu import numbers


@pytest.mark.parametrize(("form", "num_rows"), [(CpuMatrix, 1), (CpuMatrix, 7), (Int8Matrix, 1), (Int8Matrix, 90)])
def test_the_number_of_threads_changes_no_bit(form, num_rows):
    matrix, x = form(numbers(1200, 256)), numbers(num_rows, 256, seed=1)
    before = torch.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            results.append(matrix.product(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
