"""Tensor shapes that architectures have in common, by their Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from girih.arch._attention import Heads
from girih.arch._fields import Fields

Shapes = Iterator[tuple[str, tuple[int, ...]]]

PRE_NORMS = ("input_layernorm", "post_attention_layernorm")  # before attention, and before the MLP
SANDWICH_NORMS = (*PRE_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")  # before and behind both
QK_NORMS = ("q_norm", "k_norm")


def decoder(c: Fields, layer: Callable[[str, int], Shapes]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a whole decoder: embedding, layers, final norm, and an output layer that is not tied.

    Args:
        c: "vocab_size", "hidden_size", "num_hidden_layers" and "tie_word_embeddings" are read.
        layer: ("model.layers.N", N) -> the tensors of that layer.
    """
    vocab_size, hidden_size = c.whole("vocab_size"), c.whole("hidden_size")
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab_size, hidden_size)}
    for index in range(c.num_layers()):
        shapes.update(layer(f"model.layers.{index}", index))
    shapes["model.norm.weight"] = (hidden_size,)
    if not c.flag("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab_size, hidden_size)
    return shapes


def linear(name: str, out_features: int, in_features: int, *, bias: bool = False) -> Shapes:
    """Yield (tensor name, shape) of a linear layer's weight and, if it has one, its bias."""
    yield f"{name}.weight", (out_features, in_features)
    if bias:
        yield f"{name}.bias", (out_features,)


def norms(module: str, names: Iterable[str], size: int) -> Shapes:
    """Yield (tensor name, shape) of norms of `module` that have a weight only."""
    for name in names:
        yield f"{module}.{name}.weight", (size,)


def attention(
    layer: str, hidden_size: int, heads: Heads, *, bias: bool = False, out_bias: bool | None = None
) -> Shapes:
    """Yield (tensor name, shape) of the q, k, v and o projections of `layer`.

    Args:
        layer: e.g. "model.layers.3".
        hidden_size: width of the residual stream.
        heads: of the layer.
        bias: q, k and v have a bias.
        out_bias: o has one; None: if the others have.
    """
    num_heads, num_kv_heads, head_dim = heads
    for name, count in (("q", num_heads), ("k", num_kv_heads), ("v", num_kv_heads)):
        yield from linear(f"{layer}.self_attn.{name}_proj", count * head_dim, hidden_size, bias=bias)
    out_bias = bias if out_bias is None else out_bias
    yield from linear(f"{layer}.self_attn.o_proj", hidden_size, num_heads * head_dim, bias=out_bias)


def gated_mlp(module: str, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> Shapes:
    """Yield (tensor name, shape) of the gate, up and down projections of `module`, e.g. "model.layers.3.mlp"."""
    for name in ("gate", "up"):
        yield from linear(f"{module}.{name}_proj", intermediate_size, hidden_size, bias=bias)
    yield from linear(f"{module}.down_proj", hidden_size, intermediate_size, bias=bias)


def experts(
    module: str, num_experts: int, hidden_size: int, intermediate_size: int, *, input_first: bool = False
) -> Shapes:
    """Yield (tensor name, shape) of the gated experts of a layer, all in two tensors.

    Args:
        module: e.g. "model.layers.3.mlp.experts".
        num_experts: how many.
        hidden_size: width of the residual stream.
        intermediate_size: width inside one expert.
        input_first: the input axis comes before the output axis.
    """
    up, down = (2 * intermediate_size, hidden_size), (hidden_size, intermediate_size)
    yield f"{module}.gate_up_proj", (num_experts, *(up[::-1] if input_first else up))
    yield f"{module}.down_proj", (num_experts, *(down[::-1] if input_first else down))
