"""Products of int8 have the same bits on every processor."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from girih.linear import int8
from girih.linear.int8 import Int8Matrix
from tests.unit.linear.test_cpu import numbers

AVX2 = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+sse4.2"}


def test_both_kinds_of_processor_find_the_same_bits(monkeypatch):
    weight = numbers(100, 1100)
    matrix, x = Int8Matrix(weight), numbers(70, 1100, seed=1)
    given = matrix.product(x)
    monkeypatch.setattr(int8, "multiplies_int8", lambda: False)
    assert torch.equal(given, matrix.product(x))


def test_a_processor_of_another_kind_computes_the_same(tmp_path):
    script = Path(__file__).with_name("save_products.py")
    results = []
    for name, settings_of in (("own", {}), ("avx2", AVX2)):
        environment = os.environ | settings_of
        if settings_of:
            environment["NUMBA_CACHE_DIR"] = str(tmp_path / "cache")
        subprocess.run([sys.executable, script, tmp_path / f"{name}.npy"], check=True, env=environment)
        results.append(np.load(tmp_path / f"{name}.npy"))
    assert np.array_equal(*results)
