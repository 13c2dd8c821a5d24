"""Torch models, one file per Hugging Face `model_type`; the same names as in `girih/arch`, which holds their facts.

Every file defines `DECODER`, a class as `Decoder` describes. Parameters have Hugging Face's names, so that loading
is by name; they have no memory until the loader assigns the checkpoint's tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from girih import arch, plugins
from girih.kv.spec import KVCacheSpec
from girih.layers.attention import Attention, AttentionBackend
from girih.layers.dtypes import dtype_name
from girih.layers.forward_context import ForwardContext, ForwardContextBuilder
from girih.layers.linear import Linear, product


@dataclass(frozen=True)
class LayerSetup:
    """What a layer that caches something is built with, beside hyper-parameters.

    Args:
        name: the layer's name, e.g. "model.layers.3.self_attn".
        spec: its cache.
        dtype: of the weights.
        backend: the attention backend.
        builder: takes the registration.
    """

    name: str
    spec: KVCacheSpec
    dtype: torch.dtype
    backend: AttentionBackend
    builder: ForwardContextBuilder

    def attention(self, *, scale: float, sliding_window: int | None) -> Attention:
        """Return the layer's attention; arguments as `girih.layers.attention.Attention`."""
        return Attention(
            self.name,
            spec=self.spec,
            scale=scale,
            sliding_window=sliding_window,
            backend=self.backend,
            builder=self.builder,
        )


class Decoder(nn.Module, ABC):
    """Everything of a model but its output layer.

    The constructor takes (config, dtype, setups): config.json, the dtype of weights and activations, and a `LayerSetup`
    for each layer with a cache, in model order.
    """

    embed_tokens: nn.Embedding
    layers: nn.ModuleList

    @abstractmethod
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext, layers: Sequence[int]
    ) -> torch.Tensor:
        """Compute the flat batch of a step; see `CausalLM.forward`."""

    @abstractmethod
    def distinct_layers(self) -> list[int]:
        """Return one index of each kind of layer: all of a kind need the same memory in a step."""


class CausalLM(nn.Module):
    """A decoder that predicts the next token.

    Args:
        decoder: the model below the output layer.
        vocab_size: of the output.
        hidden_size: of the decoder's output.
        tied: whether the output layer is the embedding.
        dtype: of the weights.
        float32_rows: see `girih.layers.linear.product`.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        vocab_size: int,
        hidden_size: int,
        tied: bool,
        dtype: torch.dtype,
        float32_rows: int | None,
    ):
        super().__init__()
        self.float32_rows = float32_rows
        self.model = decoder
        self.lm_head = None if tied else Linear(hidden_size, vocab_size, bias=False, dtype=dtype)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        layers: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Compute the flat batch of a step.

        Args:
            input_ids: int64 [num_tokens].
            positions: int64 [num_tokens], each token's place in its own sequence.
            context: of this step.
            layers: indices of the decoder layers to run; None runs all.

        Returns:
            The last hidden state after the final norm, [num_tokens, hidden_size].
        """
        return self.model(input_ids, positions, context, range(len(self.model.layers)) if layers is None else layers)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [n, vocab_size] of hidden states [n, hidden_size]."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return product(hidden, head.weight, float32_rows=self.float32_rows).float()


def build_model(
    config: Mapping[str, Any],
    dtype: torch.dtype,
    backend: AttentionBackend,
    float32_rows: int | None = None,
    kv_dtype: str | None = None,
) -> tuple[CausalLM, ForwardContext]:
    """Build the model of config.json without weights.

    Args:
        config: config.json.
        dtype: of weights and activations.
        backend: the attention backend of every layer.
        float32_rows: see `girih.layers.linear.product`.
        kv_dtype: dtype name of keys and values; None: as the activations.

    Returns:
        The model, and the context that knows its layers.

    Raises:
        ConfigError: an architecture that has no file here, or a field that is not supported.
    """
    module = plugins.load("girih.models", config["model_type"], what="model architecture (model_type)")
    builder = ForwardContextBuilder()
    facts = arch.load(config)
    c = facts.parse_config(config)
    dtypes = arch.CacheDtypes(kv=kv_dtype or dtype_name(dtype), activation=dtype_name(dtype))
    specs = facts.kv_cache_specs(config, dtypes, backend.BLOCK_SIZE_MULTIPLE)
    setups = [LayerSetup(name, spec, dtype, backend, builder) for name, spec in specs.items()]
    model = CausalLM(
        module.DECODER(config, dtype, setups),
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        tied=c.tie_word_embeddings,
        dtype=dtype,
        float32_rows=float32_rows,
    )
    for layer in model.modules():
        if isinstance(layer, Linear):
            layer.float32_rows = float32_rows
    return model.requires_grad_(False).eval(), builder.build()
