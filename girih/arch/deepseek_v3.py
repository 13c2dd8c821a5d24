"""`model_type` "deepseek_v3": multi-head latent attention (MLA) over experts.

Cached is one latent vector per token, kv_lora_rank + qk_rope_head_dim elements, from which all heads' keys and values
are made; transformers' own cache holds those, expanded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from girih.arch import CacheDtypes, _shapes
from girih.arch._fields import Fields
from girih.kv.spec import KVCacheSpec
from girih.kv.specs.mla import MLAAttentionSpec

DEFAULTS = {
    "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "first_k_dense_replace": 3, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "attention_bias": False,
}  # fmt: skip
UNCOUNTED = "layers for multi-token prediction"


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, as `girih.arch` says."""
    c = Fields(config, DEFAULTS)
    first_sparse = c.whole("first_k_dense_replace", at_least=0)

    def _layer(layer: str, index: int) -> _shapes.Shapes:
        yield from attention_and_norms(c, layer)
        yield from mlp(c, f"{layer}.mlp", sparse=index >= first_sparse)

    return _shapes.decoder(c, _layer)


def attention_and_norms(c: Fields, layer: str) -> _shapes.Shapes:
    """Yield (tensor name, shape) of a layer's two norms and its attention."""
    hidden_size, num_heads, bias = c.whole("hidden_size"), c.whole("num_attention_heads"), c.flag("attention_bias")
    nope, rope, v_head_dim = c.whole("qk_nope_head_dim"), c.whole("qk_rope_head_dim"), c.whole("v_head_dim")
    q_rank, kv_rank = c.whole_or_none("q_lora_rank"), c.whole("kv_lora_rank")
    attention, q_size = f"{layer}.self_attn", num_heads * (nope + rope)
    yield from _shapes.norms(layer, _shapes.PRE_NORMS, hidden_size)
    if q_rank is None:
        yield from _shapes.linear(f"{attention}.q_proj", q_size, hidden_size)
    else:
        yield from _shapes.linear(f"{attention}.q_a_proj", q_rank, hidden_size, bias=bias)
        yield from _shapes.norms(attention, ("q_a_layernorm",), q_rank)
        yield from _shapes.linear(f"{attention}.q_b_proj", q_size, q_rank)
    yield from _shapes.linear(f"{attention}.kv_a_proj_with_mqa", kv_rank + rope, hidden_size, bias=bias)
    yield from _shapes.norms(attention, ("kv_a_layernorm",), kv_rank)
    yield from _shapes.linear(f"{attention}.kv_b_proj", num_heads * (nope + v_head_dim), kv_rank)
    yield from _shapes.linear(f"{attention}.o_proj", hidden_size, num_heads * v_head_dim, bias=bias)


def mlp(c: Fields, module: str, *, sparse: bool) -> _shapes.Shapes:
    """Yield (tensor name, shape) of a layer's MLP, or of its experts, shared expert and router."""
    hidden_size = c.whole("hidden_size")
    if not sparse:
        yield from _shapes.gated_mlp(module, hidden_size, c.whole("intermediate_size"))
        return
    num_experts, size = c.whole("n_routed_experts"), c.whole("moe_intermediate_size")
    yield from _shapes.experts(f"{module}.experts", num_experts, hidden_size, size)
    yield from _shapes.linear(f"{module}.gate", num_experts, hidden_size)
    yield from _shapes.gated_mlp(f"{module}.shared_experts", hidden_size, size * c.whole("n_shared_experts"))


def kv_cache_specs(
    config: Mapping[str, Any], dtypes: CacheDtypes, block_size_multiple: int = 16
) -> dict[str, KVCacheSpec]:
    """Return what each layer caches, as `girih.arch` says."""
    c = Fields(config, DEFAULTS)
    spec = latent_spec(c, dtypes, block_size_multiple)
    return {f"model.layers.{index}.self_attn": spec for index in range(c.num_layers())}


def latent_spec(c: Fields, dtypes: CacheDtypes, block_size_multiple: int) -> KVCacheSpec:
    """Return the cache of one layer's latent vectors."""
    size = c.whole("kv_lora_rank") + c.whole("qk_rope_head_dim")
    return MLAAttentionSpec(size, dtypes.kv, block_size_multiple=block_size_multiple)


def max_model_len(config: Mapping[str, Any]) -> int:
    """Return the model's own length limit in tokens."""
    return Fields(config, DEFAULTS).whole("max_position_embeddings")
