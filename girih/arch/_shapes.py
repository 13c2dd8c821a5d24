"""Tensor shapes that architectures have in common, by their Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def linear(name: str, out_features: int, in_features: int, *, bias: bool) -> Shapes:
    """Yield (tensor name, shape) of a linear layer's weight and, if it has one, its bias."""
    yield f"{name}.weight", (out_features, in_features)
    if bias:
        yield f"{name}.bias", (out_features,)


def attention(layer: str, *, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, bias: bool) -> Shapes:
    """Yield (tensor name, shape) of the q, k, v and o projections of `layer`."""
    for name, heads in (("q", num_heads), ("k", num_kv_heads), ("v", num_kv_heads)):
        yield from linear(f"{layer}.self_attn.{name}_proj", heads * head_dim, hidden_size, bias=bias)
    yield from linear(f"{layer}.self_attn.o_proj", hidden_size, num_heads * head_dim, bias=bias)


def gated_mlp(layer: str, *, hidden_size: int, intermediate_size: int, bias: bool) -> Shapes:
    """Yield (tensor name, shape) of the gate, up and down projections of `layer`."""
    for name in ("gate", "up"):
        yield from linear(f"{layer}.mlp.{name}_proj", intermediate_size, hidden_size, bias=bias)
    yield from linear(f"{layer}.mlp.down_proj", hidden_size, intermediate_size, bias=bias)


def embeddings(vocab_size: int, hidden_size: int, *, tied: bool) -> Shapes:
    """Yield (tensor name, shape) of embedding and final norm, and of an output layer that is not the embedding."""
    yield "model.embed_tokens.weight", (vocab_size, hidden_size)
    yield "model.norm.weight", (hidden_size,)
    if not tied:
        yield "lm_head.weight", (vocab_size, hidden_size)
