"""Norms, rotary embeddings and the MLP against transformers' own modules."""

import pytest
import torch

from girih.layers.mlp import GatedMLP
from girih.layers.norm import GemmaRMSNorm, RMSNorm
from girih.layers.operations.plain import ACTIVATIONS
from girih.layers.rotary import RotaryEmbedding, apply_rotary


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_norms_equal_transformers_bit_by_bit(kind, dtype):
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    ours, theirs = (RMSNorm, LlamaRMSNorm) if kind == "llama" else (GemmaRMSNorm, Gemma3RMSNorm)
    weight = torch.nn.Parameter(torch.linspace(-1, 2, 24).to(dtype), requires_grad=False)
    norm, oracle = ours(24, 1e-3, dtype), theirs(24, 1e-3)
    norm.weight = oracle.weight = weight
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(norm(x), oracle(x))


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_rotary_matches_transformers_also_far_out(rope):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(head_dim=64, hidden_size=128, num_attention_heads=2, rope_parameters=dict(rope))
    positions = torch.tensor([0, 1, 7, 511, 8191, 131_071])
    x = torch.randn(len(positions), 2, 64, generator=torch.Generator().manual_seed(0))
    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    ours = RotaryEmbedding(64, **rope)
    actual = apply_rotary(x, *ours.cos_sin(positions, torch.float32))
    near = positions < 1000
    torch.testing.assert_close(actual[near], expected[0].transpose(0, 1)[near], atol=1e-4, rtol=0)
    # float32 angles of 1e5 are only good to 1e-2; transformers has the same limit
    torch.testing.assert_close(actual, expected[0].transpose(0, 1), atol=5e-2, rtol=0)


def test_rotary_keeps_float32_angles_in_bfloat16():
    rotary = RotaryEmbedding(8, rope_type="default", rope_theta=10_000.0)
    positions = torch.tensor([1000])
    cos, sin = rotary.cos_sin(positions, torch.bfloat16)
    exact_cos, exact_sin = rotary.cos_sin(positions, torch.float32)
    assert torch.equal(cos, exact_cos.bfloat16())
    assert torch.equal(sin, exact_sin.bfloat16())
    assert cos.shape == (1, 1, 8)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_transformers(name):
    from transformers.activations import ACT2FN

    x = torch.linspace(-6, 6, 101)
    torch.testing.assert_close(ACTIVATIONS[name](x), ACT2FN[name](x), atol=1e-6, rtol=1e-6)


def test_modules_take_no_memory_before_loading():
    mlp = GatedMLP(8, 16, activation="silu", bias=True, dtype=torch.bfloat16)
    assert all(parameter.is_meta and parameter.dtype == torch.bfloat16 for parameter in mlp.parameters())
    assert {name: tuple(p.shape) for name, p in mlp.named_parameters()} == {
        "gate_up_proj.weight": (32, 8), "gate_up_proj.bias": (32,), "down_proj.weight": (8, 16), "down_proj.bias": (8,),
    }  # fmt: skip
