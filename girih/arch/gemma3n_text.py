"""`model_type` "gemma3n_text": four sliding layers to a full one; the last "num_kv_shared_layers" have no cache.

Those read the cache of the last layer of their own kind before them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from girih.arch import CacheDtypes, _shapes
from girih.arch._attention import attention_specs, layer_kinds, read_heads
from girih.arch._fields import Fields
from girih.errors import ConfigError
from girih.kv.spec import KVCacheSpec
from girih.kv.specs.shared import SharedCacheSpec

DEFAULTS = {
    "vocab_size": 262_400, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32768,
    "tie_word_embeddings": True, "attention_bias": False, "sliding_window": 512, "num_kv_shared_layers": 15,
    "vocab_size_per_layer_input": 262_144, "hidden_size_per_layer_input": 256, "altup_num_inputs": 4,
    "laurel_rank": 64,
}  # fmt: skip
MAX_ALTUP_INPUTS = 1000  # each but the first has two tensors of its own
PATTERN = 5  # the last of so many layers is full


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, as `girih.arch` says."""
    c = Fields(config, DEFAULTS)
    num_layers, hidden_size, per_layer = c.num_layers(), c.whole("hidden_size"), c.whole("hidden_size_per_layer_input")
    sizes, first_shared = _intermediate_sizes(config, c), num_layers - c.whole("num_kv_shared_layers", at_least=0)

    def _layer(layer: str, index: int) -> _shapes.Shapes:
        yield from _attention(c, layer, shared=index >= first_shared)
        yield from _shapes.norms(layer, _shapes.SANDWICH_NORMS, hidden_size)
        yield from _shapes.gated_mlp(f"{layer}.mlp", hidden_size, sizes[index])
        yield from _altup_and_laurel(c, layer)
        yield from _shapes.linear(f"{layer}.per_layer_input_gate", per_layer, hidden_size)
        yield from _shapes.linear(f"{layer}.per_layer_projection", hidden_size, per_layer)
        yield from _shapes.norms(layer, ("post_per_layer_input_norm",), hidden_size)

    width, square = num_layers * per_layer, (hidden_size, hidden_size)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens_per_layer.weight": (c.whole("vocab_size_per_layer_input"), width),
        "model.per_layer_model_projection.weight": (width, hidden_size),
        "model.per_layer_projection_norm.weight": (per_layer,),
    }
    more = range(c.whole("altup_num_inputs", at_most=MAX_ALTUP_INPUTS) - 1)
    shapes |= {f"model.altup_projections.{index}.weight": square for index in more}
    shapes |= _shapes.decoder(c, _layer)
    return shapes | {f"model.altup_unembed_projections.{index}.weight": square for index in more}


def kv_cache_specs(
    config: Mapping[str, Any], dtypes: CacheDtypes, block_size_multiple: int = 16
) -> dict[str, KVCacheSpec]:
    """Return what each layer caches or reads, as `girih.arch` says."""
    c = Fields(config, DEFAULTS)
    kinds, window = layer_kinds(c, PATTERN), c.whole("sliding_window")
    first_shared = len(kinds) - c.whole("num_kv_shared_layers", at_least=0)
    specs, owners = attention_specs(kinds, read_heads(c), dtypes, block_size_multiple, window=window), {}
    for index, (kind, (name, spec)) in enumerate(zip(kinds, specs.items(), strict=True)):
        if index < first_shared:
            owners[kind] = name
        elif kind in owners:
            specs[name] = SharedCacheSpec(owners[kind], spec, block_size_multiple=block_size_multiple)
        else:
            raise ConfigError(f"config.json: num_kv_shared_layers leaves no {kind} layer with a cache to read")
    return specs


def max_model_len(config: Mapping[str, Any]) -> int:
    """Return the model's own length limit in tokens."""
    return Fields(config, DEFAULTS).whole("max_position_embeddings")


def _attention(c: Fields, layer: str, *, shared: bool) -> _shapes.Shapes:
    """Yield the projections and norms of a layer; one that reads another's cache has none for keys and values."""
    heads, bias, attention = read_heads(c), c.flag("attention_bias"), f"{layer}.self_attn"
    for name, shape in _shapes.attention(layer, c.whole("hidden_size"), heads, bias=bias):
        if not (shared and (".k_proj." in name or ".v_proj." in name)):
            yield name, shape
    yield from _shapes.norms(attention, ("q_norm",) if shared else _shapes.QK_NORMS, heads.head_dim)


def _altup_and_laurel(c: Fields, layer: str) -> _shapes.Shapes:
    hidden_size, inputs, rank = c.whole("hidden_size"), c.whole("altup_num_inputs"), c.whole("laurel_rank")
    yield f"{layer}.altup.correct_output_scale", (hidden_size,)
    yield from _shapes.linear(f"{layer}.altup.correction_coefs", inputs, inputs)
    yield from _shapes.linear(f"{layer}.altup.prediction_coefs", inputs * inputs, inputs)
    yield from _shapes.linear(f"{layer}.altup.modality_router", inputs, hidden_size)
    yield from _shapes.norms(f"{layer}.altup", ("router_norm",), hidden_size)
    yield from _shapes.linear(f"{layer}.laurel.linear_left", rank, hidden_size)
    yield from _shapes.linear(f"{layer}.laurel.linear_right", hidden_size, rank)
    yield from _shapes.norms(f"{layer}.laurel", ("post_laurel_norm",), hidden_size)


def _intermediate_sizes(config: Mapping[str, Any], c: Fields) -> tuple[int, ...]:
    """Return the width of each layer's MLP: one number for all, or a list."""
    if not isinstance(config.get("intermediate_size"), (list, tuple)):
        return (c.whole("intermediate_size"),) * c.num_layers()
    sizes = c.wholes("intermediate_size")
    if len(sizes) != c.num_layers():
        raise ConfigError(
            f"config.json: intermediate_size must have one number for each of the {c.num_layers()} layers"
        )
    return sizes
