"""Attention layers as most families have them: how many heads of which size, and a cache spec for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from girih.arch._dtypes import CacheDtypes
from girih.arch._fields import Fields
from girih.kv.spec import KVCacheSpec
from girih.kv.specs.chunked_local import ChunkedLocalAttentionSpec
from girih.kv.specs.full_attention import FullAttentionSpec
from girih.kv.specs.sliding_window import SlidingWindowSpec

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"  # as "layer_types" has them


class Heads(NamedTuple):
    """Query heads, key/value heads, and the elements of each."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def read_heads(c: Fields) -> Heads:
    """Read the heads: key/value heads are the query heads where null, `head_dim` their share of `hidden_size`."""
    num_heads = c.whole("num_attention_heads")
    num_kv_heads = c.whole("num_key_value_heads", if_null=num_heads)
    return Heads(num_heads, num_kv_heads, c.whole("head_dim", if_null=max(1, c.whole("hidden_size") // num_heads)))


def layer_kinds(c: Fields, pattern: int) -> tuple[str, ...]:
    """Return "layer_types" of full and sliding layers; where null, the last of every `pattern` layers is full."""

    def _kind(index: int) -> str:
        return SLIDING if (index + 1) % pattern else FULL

    return c.per_layer("layer_types", c.num_layers(), (FULL, SLIDING), _kind)


def alternating_specs(c: Fields, pattern: int, dtypes: CacheDtypes, block_size_multiple: int) -> dict[str, KVCacheSpec]:
    """Return what full and sliding layers in the order of `layer_kinds` cache; see `attention_specs`."""
    window = c.whole("sliding_window")
    return attention_specs(layer_kinds(c, pattern), read_heads(c), dtypes, block_size_multiple, window=window)


def attention_specs(
    kinds: Sequence[str],
    heads: Heads,
    dtypes: CacheDtypes,
    block_size_multiple: int,
    *,
    window: int | None = None,
) -> dict[str, KVCacheSpec]:
    """Return what each layer "model.layers.N.self_attn" caches.

    Args:
        kinds: of each layer: FULL, SLIDING or CHUNKED.
        heads: of each layer.
        dtypes: of the caches.
        block_size_multiple: tokens per block must be a multiple of this, says the attention backend.
        window: of sliding layers the tokens a query sees, itself included; of chunked ones the tokens of a chunk.
            None: all layers are full.
    """
    return {
        f"model.layers.{index}.self_attn": attention_spec(kind, heads, dtypes, block_size_multiple, window=window)
        for index, kind in enumerate(kinds)
    }


def attention_spec(
    kind: str, heads: Heads, dtypes: CacheDtypes, block_size_multiple: int, *, window: int | None = None
) -> KVCacheSpec:
    """Return what one layer caches; the arguments are those of `attention_specs`."""
    _, num_kv_heads, size = heads
    if kind == FULL or window is None:
        return FullAttentionSpec(num_kv_heads, size, dtypes.kv, block_size_multiple=block_size_multiple)
    spec = SlidingWindowSpec if kind == SLIDING else ChunkedLocalAttentionSpec
    return spec(num_kv_heads, size, dtypes.kv, window, block_size_multiple=block_size_multiple)
