"""`model_type` "gemma3_text": sliding-window and full layers, each kind with its own rotary base; q and k norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from girih.arch.gemma3_text import SLIDING, Gemma3TextConfig, parse_config
from girih.layers.forward_context import ForwardContext
from girih.layers.heads import RotaryHeads
from girih.layers.linear import Vocabulary
from girih.layers.mlp import GatedMLP
from girih.layers.module import Module
from girih.layers.norm import GemmaRMSNorm
from girih.layers.parallel import Ranks
from girih.layers.residual import Residual
from girih.layers.rotary import RotaryEmbedding
from girih.models import Decoder, LayerSetup


class Gemma3Attention(Module):
    """Projections, norms of queries and keys, rotary embedding and attention of one layer.

    Args:
        c: hyper-parameters.
        index: of the decoder layer.
        setup: what else the layer is built with.
    """

    def __init__(self, c: Gemma3TextConfig, index: int, setup: LayerSetup):
        super().__init__()
        dtype = setup.dtype
        self.qkv_proj, self.o_proj = setup.projections(c)
        self.heads = RotaryHeads(self.qkv_proj.sizes, c.head_dim)
        self.q_norm = GemmaRMSNorm(c.head_dim, c.rms_norm_eps, dtype)
        self.k_norm = GemmaRMSNorm(c.head_dim, c.rms_norm_eps, dtype)
        window = c.sliding_window if c.layer_types[index] == SLIDING else None
        self.attention = setup.attention(scale=c.query_pre_attn_scalar**-0.5, sliding_window=window)

    def forward(
        self, x: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor], context: ForwardContext
    ) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to the same shape; cos_sin as `RotaryEmbedding.cos_sin` returns it."""
        norms = (self.q_norm, self.k_norm)
        query, key, value = self.heads(self.qkv_proj(x), cos_sin, norms)
        return self.o_proj(self.attention(query, key, value, context))


class Gemma3DecoderLayer(Module):
    """Attention and MLP, each between two norms and beside a residual; arguments as `Gemma3Attention`."""

    def __init__(self, c: Gemma3TextConfig, index: int, setup: LayerSetup):
        super().__init__()
        dtype = setup.dtype
        self.input_layernorm = GemmaRMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.self_attn = Gemma3Attention(c, index, setup)
        self.post_attention_layernorm = GemmaRMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.pre_feedforward_layernorm = GemmaRMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.mlp = GatedMLP(
            c.hidden_size,
            c.intermediate_size,
            activation=c.hidden_activation,
            bias=False,
            dtype=dtype,
            ranks=setup.ranks,
        )
        self.post_feedforward_layernorm = GemmaRMSNorm(c.hidden_size, c.rms_norm_eps, dtype)

    def forward(self, x: Residual, cos_sin: tuple[torch.Tensor, torch.Tensor], context: ForwardContext) -> None:
        """Add what the layer computes to the hidden states."""
        x.add(self.self_attn(x.normed(self.input_layernorm), cos_sin, context), after=self.post_attention_layernorm)
        x.add(self.mlp(x.normed(self.pre_feedforward_layernorm)), after=self.post_feedforward_layernorm)


class Gemma3TextModel(Decoder):
    """Scaled embedding, decoder layers and final norm.

    Args:
        config: config.json.
        dtype: of weights and activations.
        setups: of the layers.
        ranks: that share each layer.
    """

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, setups: Sequence[LayerSetup], ranks: Ranks):
        super().__init__()
        c = parse_config(config)
        self.layer_types = c.layer_types
        self.embed_scale = torch.tensor(c.hidden_size**0.5, dtype=dtype)  # rounded to the dtype first, as trained
        self.embed_tokens = Vocabulary(c.vocab_size, c.hidden_size, dtype=dtype, ranks=ranks)
        self.layers = nn.ModuleList(Gemma3DecoderLayer(c, index, setup) for index, setup in enumerate(setups))
        self.norm = GemmaRMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.rotary_full = RotaryEmbedding(c.head_dim, **vars(c.rope_full))
        self.rotary_sliding = RotaryEmbedding(c.head_dim, **vars(c.rope_sliding))

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return scaled rows of the embedding; see `Decoder.embed`."""
        return self.embed_tokens(input_ids) * self.embed_scale

    def run(
        self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext, layers: Sequence[int]
    ) -> torch.Tensor:
        """Map hidden states through layers; see `Decoder.run`."""
        full, sliding = (rotary.cos_sin(positions, x.dtype) for rotary in (self.rotary_full, self.rotary_sliding))
        residual = Residual(x)
        for index, layer in zip(layers, self.layers_at(layers), strict=True):
            layer(residual, sliding if self.layer_types[index] == SLIDING else full, context)
        return residual.value()

    def distinct_layers(self, layers: Sequence[int]) -> list[int]:
        """Return the first layer of each type."""
        first = {self.layer_types[index]: index for index in reversed(layers)}
        return [first[kind] for kind in sorted(first)]


DECODER = Gemma3TextModel
