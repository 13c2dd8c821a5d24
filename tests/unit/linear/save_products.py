"""Computes some products of int8, extreme ones among them, and saves them: for another processor than this one."""

import sys

import numpy as np
import torch

from girih.linear.int8 import Int8Matrix

generator = np.random.default_rng(0)
x = generator.standard_normal((9, 200), np.float32)
weight = generator.standard_normal((70, 200), np.float32)
x[0], x[1], weight[0], weight[1] = 1, -1, 1, -1
np.save(sys.argv[1], Int8Matrix(torch.from_numpy(weight)).product(torch.from_numpy(x)).numpy())
