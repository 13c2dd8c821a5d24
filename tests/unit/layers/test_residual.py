"""The residual stream gives the sum of what was added, whoever reads it when."""

import torch
from torch import nn

from girih.layers.norm import GemmaRMSNorm, RMSNorm
from girih.layers.residual import Residual


def test_what_is_added_is_in_the_next_norm_and_in_the_value():
    x, first, second = (torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    norm, after = RMSNorm(8, 1e-3, torch.float32), GemmaRMSNorm(8, 1e-3, torch.float32)
    norm.weight = after.weight = nn.Parameter(torch.linspace(-1, 1, 8), requires_grad=False)
    stream = Residual(x.clone())
    assert torch.equal(stream.normed(norm), norm(x))
    stream.add(first, after=after)
    assert torch.equal(stream.normed(norm), norm(x + after(first)))
    stream.add(first)
    stream.add(second, after=after)
    expected = x + after(first) + first + after(second)
    assert torch.equal(stream.value(), expected)
    assert torch.equal(stream.value(), expected)
