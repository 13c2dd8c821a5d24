"""Torch models, one file per Hugging Face `model_type`; the same names as in `girih/arch`, which holds their facts.

Every file defines `MODEL`, a class as `CausalLM` describes. Its parameters have Hugging Face's names, so that
loading is by name; they have no memory until the loader assigns the checkpoint's tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from girih import plugins
from girih.attention import AttentionBackend
from girih.layers.forward_context import ForwardContext, ForwardContextBuilder


class CausalLM(nn.Module, ABC):
    """A decoder that predicts the next token; its constructor takes the arguments of `build_model` and a builder."""

    @abstractmethod
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

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [n, vocab_size] of hidden states [n, hidden_size]."""

    @abstractmethod
    def distinct_layers(self) -> list[int]:
        """Return one index of each kind of decoder layer: all of a kind need the same memory in a step."""


def build_model(
    config: Mapping[str, Any], dtype: torch.dtype, backend: AttentionBackend
) -> tuple[CausalLM, ForwardContext]:
    """Build the model of config.json without weights.

    Args:
        config: config.json.
        dtype: of weights and activations.
        backend: the attention backend of every layer.

    Returns:
        The model, and the context that knows its layers.

    Raises:
        ConfigError: an architecture that has no file here, or a field that is not supported.
    """
    module = plugins.load("girih.models", config["model_type"], what="model architecture (model_type)")
    builder = ForwardContextBuilder()
    model = module.MODEL(config, dtype, backend, builder)
    return model, builder.build()
