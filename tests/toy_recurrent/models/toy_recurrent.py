"""`model_type` "toy_recurrent": the toy as a model file, as those in `girih/models`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from girih.layers.forward_context import ForwardContext
from girih.layers.linear import Linear, Vocabulary
from girih.layers.mlp import GatedMLP
from girih.layers.norm import RMSNorm
from girih.layers.parallel import Ranks
from girih.layers.recurrence import Recurrence, State
from girih.models import Decoder, LayerSetup
from tests.toy_recurrent.arch.toy_recurrent import RECURRENT, SLIDING, ToyConfig, parse_config

MEMORY = 2.0
"""Added to what decides how much of the state is kept: without any input sigmoid(2) = 0.88 of it."""


class ShortConvolution(nn.Module):
    """The weight [inner_size, kernel] of a convolution of each channel by itself."""

    def __init__(self, inner_size: int, kernel: int, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inner_size, kernel, dtype=dtype, device="meta"))

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        """Map [num_rows, inner_size, kernel - 1 + num_tokens] to [num_rows, inner_size, num_tokens]."""
        return (window.unfold(-1, self.weight.shape[1], 1) * self.weight.unsqueeze(1)).sum(-1)


class Mixer(nn.Module):
    """A short convolution, then h = a * h + (1 - a) * u for each channel, where a depends on the token."""

    def __init__(self, c: ToyConfig, setup: LayerSetup):
        super().__init__()
        dtype = setup.dtype
        self.in_proj = Linear(c.hidden_size, 3 * c.inner_size, bias=False, dtype=dtype)
        self.conv = ShortConvolution(c.inner_size, c.conv_kernel, dtype)
        self.out_proj = Linear(c.inner_size, c.hidden_size, bias=False, dtype=dtype)
        self.recurrence = Recurrence(
            setup.name, spec=setup.spec, scan=self._scan, output_size=c.inner_size, builder=setup.builder
        )

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to the same shape."""
        return self.out_proj(self.recurrence(self.in_proj(x), context))

    def _scan(self, inputs: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        columns, h = state
        u, gate, keep = inputs.chunk(3, dim=-1)
        window = torch.cat((columns, u.transpose(1, 2)), dim=-1)
        u = nn.functional.silu(self.conv(window)).transpose(1, 2).float()
        a = torch.sigmoid(keep.float() + MEMORY)
        outputs = torch.empty_like(u)
        for t in range(u.shape[1]):
            h = a[:, t] * h + (1 - a[:, t]) * u[:, t]
            outputs[:, t] = h
        return outputs.to(inputs.dtype) * nn.functional.silu(gate), (window[:, :, u.shape[1] :], h)


class ToyAttention(nn.Module):
    """Grouped-query attention without positions, with a window or without."""

    def __init__(self, c: ToyConfig, setup: LayerSetup, *, window: int | None):
        super().__init__()
        dtype = setup.dtype
        self.head_dim = c.head_dim
        q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, q_size, bias=False, dtype=dtype)
        self.k_proj = Linear(c.hidden_size, kv_size, bias=False, dtype=dtype)
        self.v_proj = Linear(c.hidden_size, kv_size, bias=False, dtype=dtype)
        self.o_proj = Linear(q_size, c.hidden_size, bias=False, dtype=dtype)
        self.attention = setup.attention(scale=c.head_dim**-0.5, sliding_window=window)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to the same shape."""
        query, key, value = (
            projection(x).unflatten(1, (-1, self.head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(self.attention(query, key, value, context))


class ToyModel(Decoder):
    """Embedding, layers and final norm; see `girih.models.Decoder`."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, setups: Sequence[LayerSetup], ranks: Ranks):
        super().__init__()
        c = parse_config(config)
        self.kinds = c.layer_types
        self.embed_tokens = Vocabulary(c.vocab_size, c.hidden_size, dtype=dtype, ranks=ranks)
        self.layers = nn.ModuleList()
        for kind, setup in zip(c.layer_types, setups, strict=True):
            if kind == RECURRENT:
                mixer: nn.Module = Mixer(c, setup)
            else:
                mixer = ToyAttention(c, setup, window=c.sliding_window if kind == SLIDING else None)
            layer = nn.Module()
            layer.mixer, layer.mixer_norm = mixer, RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
            layer.mlp = GatedMLP(c.hidden_size, c.intermediate_size, activation="silu", bias=False, dtype=dtype)
            layer.mlp_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
            self.layers.append(layer)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)

    def run(
        self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext, layers: Sequence[int]
    ) -> torch.Tensor:
        """Map hidden states through layers; the model has no positions but what its layers remember."""
        for index in layers:
            layer = self.layers[index]
            x = x + layer.mixer(layer.mixer_norm(x), context)
            x = x + layer.mlp(layer.mlp_norm(x))
        return x

    def distinct_layers(self, layers: Sequence[int]) -> list[int]:
        """Return the first layer of each kind."""
        first = {self.kinds[index]: index for index in reversed(layers)}
        return [first[kind] for kind in sorted(first)]


DECODER = ToyModel
