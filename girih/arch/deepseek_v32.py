"""`model_type` "deepseek_v32": deepseek_v3 with an indexer in every layer that chooses the tokens to attend to.

The indexer caches one key of "index_head_dim" elements per token, here in the dtype of the latent vectors. DeepSeek's
own code keeps it as 8-bit numbers with a float32 scale, 132 bytes: what dtype "int8" plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from girih.arch import CacheDtypes, _shapes, deepseek_v3
from girih.arch._fields import Fields
from girih.kv.spec import KVCacheSpec
from girih.kv.specs.mla import MLAAttentionSpec

DENSE, SPARSE = "dense", "sparse"  # as "mlp_layer_types" has them
DEFAULTS = deepseek_v3.DEFAULTS | {
    "max_position_embeddings": 163_840, "mlp_layer_types": None, "index_head_dim": 128, "index_n_heads": 64,
}  # fmt: skip
UNCOUNTED = deepseek_v3.UNCOUNTED


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, as `girih.arch` says."""
    c = Fields(config, DEFAULTS)
    hidden_size, q_rank = c.whole("hidden_size"), c.whole("q_lora_rank")
    head_dim, num_heads = c.whole("index_head_dim"), c.whole("index_n_heads")
    first_sparse = c.whole("first_k_dense_replace", at_least=0)

    def _kind(index: int) -> str:
        return SPARSE if index >= first_sparse else DENSE

    kinds = c.per_layer("mlp_layer_types", c.num_layers(), (DENSE, SPARSE), _kind)

    def _layer(layer: str, index: int) -> _shapes.Shapes:
        yield from deepseek_v3.attention_and_norms(c, layer)
        indexer = f"{layer}.self_attn.indexer"
        yield from _shapes.linear(f"{indexer}.wq_b", num_heads * head_dim, q_rank)
        yield from _shapes.linear(f"{indexer}.wk", head_dim, hidden_size)
        yield from ((f"{indexer}.k_norm.{name}", (head_dim,)) for name in ("weight", "bias"))
        yield from _shapes.linear(f"{indexer}.weights_proj", num_heads, hidden_size)
        yield from deepseek_v3.mlp(c, f"{layer}.mlp", sparse=kinds[index] == SPARSE)

    return _shapes.decoder(c, _layer)


def kv_cache_specs(
    config: Mapping[str, Any], dtypes: CacheDtypes, block_size_multiple: int = 16
) -> dict[str, KVCacheSpec]:
    """Return what each layer and each indexer caches, as `girih.arch` says."""
    c = Fields(config, DEFAULTS)
    latent = deepseek_v3.latent_spec(c, dtypes, block_size_multiple)
    key = MLAAttentionSpec(c.whole("index_head_dim"), dtypes.kv, block_size_multiple=block_size_multiple)
    specs: dict[str, KVCacheSpec] = {}
    for index in range(c.num_layers()):
        layer = f"model.layers.{index}.self_attn"
        specs |= {layer: latent, f"{layer}.indexer": key}
    return specs


def max_model_len(config: Mapping[str, Any]) -> int:
    """Return the model's own length limit in tokens."""
    return Fields(config, DEFAULTS).whole("max_position_embeddings")
