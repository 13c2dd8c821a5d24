"""Torch models, one file per Hugging Face `model_type`; the same names as in `girih/arch`, which holds their facts.

Every file defines `DECODER`, a class as `Decoder` describes. Parameters have Hugging Face's names, or say which of them
they are merged from, so that loading is by name; they have no memory until the loader assigns the checkpoint's tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from girih import arch, plugins
from girih.arch._decoder import DecoderConfig
from girih.errors import ConfigError
from girih.kv.spec import KVCacheSpec
from girih.layers.attention import Attention, AttentionBackend
from girih.layers.dtypes import dtype_name
from girih.layers.forward_context import ForwardContext, ForwardContextBuilder
from girih.layers.linear import Linear, RowLinear, Vocabulary
from girih.layers.merged import MergedLinear
from girih.layers.module import Module
from girih.layers.norm import RMSNorm
from girih.layers.operations import Operations, WithOperations, plain
from girih.layers.parallel import ALONE, Ranks
from girih.layers.replay import ReplayedLayers
from girih.layers.residual import Residual


@dataclass(frozen=True)
class LayerSetup:
    """What a layer that caches something is built with, beside hyper-parameters.

    Args:
        name: the layer's name, e.g. "model.layers.3.self_attn".
        spec: its cache.
        dtype: of the weights.
        backend: the attention backend.
        builder: takes the registration.
        ranks: that share the layer.
    """

    name: str
    spec: KVCacheSpec
    dtype: torch.dtype
    backend: AttentionBackend
    builder: ForwardContextBuilder
    ranks: Ranks

    def projections(self, c: DecoderConfig) -> tuple[MergedLinear, RowLinear]:
        """Return the projection of queries, keys and values, and that of the output: those of this rank's heads.

        Args:
            c: hyper-parameters.
        """
        heads, kv_heads = self.ranks.share_heads(c.num_attention_heads), self.ranks.share_heads(c.num_key_value_heads)
        columns, kv_columns = (range(part.start * c.head_dim, part.stop * c.head_dim) for part in (heads, kv_heads))
        parts = {"q_proj": columns, "k_proj": kv_columns, "v_proj": kv_columns}
        merged = MergedLinear(c.hidden_size, parts, bias=c.attention_bias, dtype=self.dtype)
        output = RowLinear(columns, c.hidden_size, bias=c.attention_bias, dtype=self.dtype, ranks=self.ranks)
        return merged, output

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


class Decoder(Module, ABC):
    """Everything of a model but its output layer.

    The constructor takes (config, dtype, setups, ranks): config.json, the dtype of weights and activations, a
    `LayerSetup` for each layer with a cache, in model order, and the ranks that share each layer. It builds all layers;
    those of other pipeline stages are taken out again. A model that uses a plain `Linear` runs on one rank only.
    """

    embed_tokens: Vocabulary
    layers: nn.ModuleList
    norm: RMSNorm

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return what the first layer gets, [num_tokens, hidden_size], for int64 [num_tokens]."""
        return self.embed_tokens(input_ids)

    def layers_at(self, indices: Sequence[int]) -> list[nn.Module]:
        """Return some layers, in order; to ask torch's list for one after the other takes long."""
        every = list(self.layers)
        return [every[index] for index in indices]

    @abstractmethod
    def run(
        self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext, layers: Sequence[int]
    ) -> torch.Tensor:
        """Map hidden states [num_tokens, hidden_size] through some layers, without the last norm.

        Those that are given may be changed in place. What depends on the step beside hidden states, in whatever way but
        by kernels that are given the context's metadata, is made of positions by torch, as `girih.layers.replay` says.
        """

    @abstractmethod
    def distinct_layers(self, layers: Sequence[int]) -> list[int]:
        """Return one index of each kind of layer among these: all of a kind need the same memory in a step."""


class CausalLM(nn.Module):
    """A decoder that predicts the next token, or the part of one that a pipeline stage has.

    Args:
        decoder: the model below the output layer.
        vocab_size: of the output.
        hidden_size: of the decoder's output.
        tied: whether the output layer is the embedding.
        dtype: of the weights.
        ranks: this worker among others; it says which layers are here.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        vocab_size: int,
        hidden_size: int,
        tied: bool,
        dtype: torch.dtype,
        ranks: Ranks,
    ):
        super().__init__()
        self.hidden_size, self.dtype = hidden_size, dtype
        self.model = decoder
        self.lm_head = None if tied else Vocabulary(vocab_size, hidden_size, dtype=dtype, ranks=ranks)
        self.place = ranks.place
        self.layers: Sequence[int] = ranks.place.layers or range(len(decoder.layers))
        self._drop_other_stages(tied)
        is_alone = ranks.size == 1 and self.place.is_first and self.place.is_last
        self.replayed = ReplayedLayers(decoder.run, self.layers) if is_alone else None

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        layers: Sequence[int] | None = None,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the flat batch of a step.

        Args:
            input_ids: int64 [num_tokens]; only the first pipeline stage reads them.
            positions: int64 [num_tokens], each token's place in its own sequence.
            context: of this step.
            layers: indices of the decoder layers to run; None runs all that are here.
            hidden: on later stages, what the stage before returned.

        Returns:
            The last hidden state, [num_tokens, hidden_size], on the last stage after the final norm.
        """
        x = self.model.embed(input_ids) if hidden is None else hidden
        if layers is None and self.replayed is not None:
            x = self.replayed(x, positions, context)
        else:
            x = self.model.run(x, positions, context, self.layers if layers is None else layers)
        return Residual(x).normed(self.model.norm) if self.place.is_last else x

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return float32 logits [n, vocab_size] of hidden states [n, hidden_size]; None on ranks that do not sample.

        All ranks of the last stage must ask together.
        """
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return head.logits(hidden)

    def distinct_layers(self) -> list[int]:
        """Return one index of each kind of layer that is here."""
        return self.model.distinct_layers(self.layers)

    def _drop_other_stages(self, tied: bool) -> None:
        """Take out what other stages have; names and indices of the rest stay, so that loading is by name."""
        for index in set(range(len(self.model.layers))) - set(self.layers):
            self.model.layers[index] = nn.Identity()
        if not (self.place.is_first or (self.place.is_last and tied)):
            del self.model.embed_tokens
        if not self.place.is_last:
            del self.model.norm
            self.lm_head = None


def build_model(
    config: Mapping[str, Any],
    dtype: torch.dtype,
    backend: AttentionBackend,
    kv_dtype: str | None = None,
    ranks: Ranks = ALONE,
    operations: Operations = plain,
) -> tuple[CausalLM, ForwardContext]:
    """Build the model of config.json, or one worker's part of it, without weights.

    Args:
        config: config.json.
        dtype: of weights and activations.
        backend: the attention backend of every layer.
        kv_dtype: dtype name of keys and values; None: as the activations.
        ranks: this worker among others.
        operations: those of the device.

    Returns:
        The model, and the context that knows its layers.

    Raises:
        ConfigError: an architecture that has no file here, a field that is not supported, or a model that tensor
            parallel ranks cannot share.
    """
    module = plugins.load("girih.models", config["model_type"], what="model architecture (model_type)")
    builder = ForwardContextBuilder()
    facts = arch.load(config)
    c = facts.parse_config(config)
    dtypes = arch.CacheDtypes(kv=kv_dtype or dtype_name(dtype), activation=dtype_name(dtype))
    specs = facts.kv_cache_specs(config, dtypes, backend.BLOCK_SIZE_MULTIPLE)
    setups = [LayerSetup(name, spec.shard(ranks.size), dtype, backend, builder, ranks) for name, spec in specs.items()]
    model = CausalLM(
        module.DECODER(config, dtype, setups, ranks),
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        tied=c.tie_word_embeddings,
        dtype=dtype,
        ranks=ranks,
    )
    if ranks.size > 1 and any(type(layer) is Linear for layer in model.modules()):
        raise ConfigError(
            f"the layers of a model of type {config['model_type']!r} cannot be shared by {ranks.size} tensor-parallel "
            "ranks in this version; set --tensor-parallel-size to 1"
        )
    for layer in model.modules():
        if isinstance(layer, WithOperations):
            layer.operations = operations
    context, here = builder.build(), set(model.modules())
    layers = {name: layer for name, layer in context.layers.items() if layer in here}
    return model.requires_grad_(False).eval(), replace(context, layers=layers)
