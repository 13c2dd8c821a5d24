"""`model_type` "gemma3_text": sliding-window and full layers, each kind with its own rotary base; q and k norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from girih.arch.gemma3_text import SLIDING, Gemma3TextConfig, parse_config
from girih.layers.forward_context import ForwardContext
from girih.layers.linear import Vocabulary
from girih.layers.mlp import GatedMLP
from girih.layers.norm import GemmaRMSNorm
from girih.layers.parallel import Ranks
from girih.layers.rotary import RotaryEmbedding, apply_rotary
from girih.models import Decoder, LayerSetup


class Gemma3Attention(nn.Module):
    """Projections, norms of queries and keys, rotary embedding and attention of one layer.

    Args:
        c: hyper-parameters.
        index: of the decoder layer.
        setup: what else the layer is built with.
    """

    def __init__(self, c: Gemma3TextConfig, index: int, setup: LayerSetup):
        super().__init__()
        dtype = setup.dtype
        self.head_dim = c.head_dim
        self.qkv_proj, self.o_proj = setup.projections(c)
        self.q_norm = GemmaRMSNorm(c.head_dim, c.rms_norm_eps, dtype)
        self.k_norm = GemmaRMSNorm(c.head_dim, c.rms_norm_eps, dtype)
        window = c.sliding_window if c.layer_types[index] == SLIDING else None
        self.attention = setup.attention(scale=c.query_pre_attn_scalar**-0.5, sliding_window=window)

    def forward(
        self, x: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor], context: ForwardContext
    ) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to the same shape; cos_sin as `RotaryEmbedding.cos_sin` returns it."""
        parts = self.qkv_proj(x).split(self.qkv_proj.sizes, dim=1)
        query, key, value = (part.unflatten(1, (-1, self.head_dim)) for part in parts)
        query = apply_rotary(self.q_norm(query), *cos_sin)
        key = apply_rotary(self.k_norm(key), *cos_sin)
        return self.o_proj(self.attention(query, key, value, context))


class Gemma3DecoderLayer(nn.Module):
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

    def forward(
        self, x: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor], context: ForwardContext
    ) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to the same shape."""
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), cos_sin, context))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


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
        for index in layers:
            x = self.layers[index](x, sliding if self.layer_types[index] == SLIDING else full, context)
        return x

    def distinct_layers(self, layers: Sequence[int]) -> list[int]:
        """Return the first layer of each type."""
        first = {self.layer_types[index]: index for index in reversed(layers)}
        return [first[kind] for kind in sorted(first)]


DECODER = Gemma3TextModel
