"""`model_type` "llama": Llama 2 and 3, SmolLM2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from girih.arch.llama import LlamaConfig, parse_config
from girih.layers.forward_context import ForwardContext
from girih.layers.heads import RotaryHeads
from girih.layers.linear import Vocabulary
from girih.layers.mlp import GatedMLP
from girih.layers.module import Module
from girih.layers.norm import RMSNorm
from girih.layers.parallel import Ranks
from girih.layers.residual import Residual
from girih.layers.rotary import RotaryEmbedding
from girih.models import Decoder, LayerSetup


class LlamaAttention(Module):
    """Projections, rotary embedding and attention of one layer.

    Args:
        c: hyper-parameters.
        setup: what else the layer is built with.
    """

    def __init__(self, c: LlamaConfig, setup: LayerSetup):
        super().__init__()
        self.qkv_proj, self.o_proj = setup.projections(c)
        self.heads = RotaryHeads(self.qkv_proj.sizes, c.head_dim)
        self.attention = setup.attention(scale=c.head_dim**-0.5, sliding_window=None)

    def forward(
        self, x: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor], context: ForwardContext
    ) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to the same shape; cos_sin as `RotaryEmbedding.cos_sin` returns it."""
        query, key, value = self.heads(self.qkv_proj(x), cos_sin)
        return self.o_proj(self.attention(query, key, value, context))


class LlamaDecoderLayer(Module):
    """Attention and MLP, each behind a norm and beside a residual; arguments as `LlamaAttention`."""

    def __init__(self, c: LlamaConfig, setup: LayerSetup):
        super().__init__()
        dtype = setup.dtype
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.self_attn = LlamaAttention(c, setup)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.mlp = GatedMLP(
            c.hidden_size,
            c.intermediate_size,
            activation=c.hidden_act,
            bias=c.mlp_bias,
            dtype=dtype,
            ranks=setup.ranks,
        )

    def forward(self, x: Residual, cos_sin: tuple[torch.Tensor, torch.Tensor], context: ForwardContext) -> None:
        """Add what the layer computes to the hidden states."""
        x.add(self.self_attn(x.normed(self.input_layernorm), cos_sin, context))
        x.add(self.mlp(x.normed(self.post_attention_layernorm)))


class LlamaModel(Decoder):
    """Embedding, decoder layers and final norm.

    Args:
        config: config.json.
        dtype: of weights and activations.
        setups: of the layers.
        ranks: that share each layer.
    """

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, setups: Sequence[LayerSetup], ranks: Ranks):
        super().__init__()
        c = parse_config(config)
        self.embed_tokens = Vocabulary(c.vocab_size, c.hidden_size, dtype=dtype, ranks=ranks)
        self.layers = nn.ModuleList(LlamaDecoderLayer(c, setup) for setup in setups)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.rotary = RotaryEmbedding(c.head_dim, **vars(c.rope))

    def run(
        self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext, layers: Sequence[int]
    ) -> torch.Tensor:
        """Map hidden states through layers; see `Decoder.run`."""
        cos_sin = self.rotary.cos_sin(positions, x.dtype)
        residual = Residual(x)
        for layer in self.layers_at(layers):
            layer(residual, cos_sin, context)
        return residual.value()

    def distinct_layers(self, layers: Sequence[int]) -> list[int]:
        """Return the first one: all layers are alike."""
        return [layers[0]]


DECODER = LlamaModel
