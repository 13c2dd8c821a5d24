"""`model_type` "nemotron_h": each layer is one of Mamba 2, full attention, an MLP or experts.

The last two cache nothing. Layers are listed in "layers_block_type", or in "hybrid_override_pattern", a letter each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from girih.arch import CacheDtypes, _shapes
from girih.arch._attention import FULL, attention_spec, read_heads
from girih.arch._fields import Fields
from girih.arch._state import LINEAR, Mamba2, hybrid_kinds, read_fields, rename
from girih.errors import ConfigError
from girih.kv.spec import KVCacheSpec

DEFAULTS = {
    "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 21504, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "mlp_bias": False,
    "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4,
    "use_conv_bias": True, "use_bias": False, "n_routed_experts": 8, "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688, "moe_latent_size": None,
}  # fmt: skip
OLDER_NAMES = {
    "num_local_experts": "n_routed_experts", "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
}  # fmt: skip
MLP, MOE = "mlp", "moe"
DEFAULT_KINDS = [LINEAR, MOE, FULL, MLP]
LETTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": MOE}


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, as `girih.arch` says; embedding and output layer are never one."""
    c, kinds = _read(config)
    hidden_size, heads, mamba = c.whole("hidden_size"), read_heads(c), _mamba(c)

    def _layer(layer: str, index: int) -> _shapes.Shapes:
        yield from _shapes.norms(layer, ("norm",), hidden_size)
        mixer, kind = f"{layer}.mixer", kinds[index]
        if kind == LINEAR:
            yield from mamba.weight_shapes(mixer, hidden_size)
        elif kind == FULL:
            yield from _shapes.attention(layer, hidden_size, heads)
        elif kind == MLP:
            yield from _mlp(c, mixer, c.whole("intermediate_size"))
        else:
            yield from _experts(c, mixer)

    shapes = {**_shapes.decoder(c, _layer), "lm_head.weight": (c.whole("vocab_size"), hidden_size)}
    shapes = rename(shapes, "model.norm.", "model.norm_f.")
    shapes = rename(shapes, "model.embed_tokens.", "model.embeddings.")
    return rename(shapes, ".self_attn.", ".mixer.")


def kv_cache_specs(
    config: Mapping[str, Any], dtypes: CacheDtypes, block_size_multiple: int = 16
) -> dict[str, KVCacheSpec]:
    """Return what each layer caches, as `girih.arch` says."""
    c, kinds = _read(config)
    specs = {
        LINEAR: _mamba(c).state_spec(dtypes, block_size_multiple),
        FULL: attention_spec(FULL, read_heads(c), dtypes, block_size_multiple),
    }
    return {f"model.layers.{index}.mixer": specs[kind] for index, kind in enumerate(kinds) if kind in specs}


def max_model_len(config: Mapping[str, Any]) -> int:
    """Return the model's own length limit in tokens."""
    return Fields(config, DEFAULTS).whole("max_position_embeddings")


def _read(config: Mapping[str, Any]) -> tuple[Fields, tuple[str, ...]]:
    """Return the fields and the kind of each layer; "num_hidden_layers" is the length of their list."""
    listed = config.get("layers_block_type") or config.get("layer_types")
    if listed is None:
        pattern = config.get("hybrid_override_pattern")
        listed = DEFAULT_KINDS if pattern is None else _kinds_of(pattern)
    num_layers = len(listed) if isinstance(listed, (list, tuple)) else 1
    c = read_fields({**config, "layers_block_type": listed, "num_hidden_layers": num_layers}, DEFAULTS, OLDER_NAMES)
    return c, hybrid_kinds(c, "layers_block_type", lambda _index: LINEAR, (MLP, MOE))


def _kinds_of(pattern: object) -> list[str]:
    """Return the kinds of layers that the letters of a "hybrid_override_pattern" stand for."""
    if not isinstance(pattern, str) or not pattern or set(pattern) - LETTERS.keys():
        letters = ", ".join(f"{letter} {kind}" for letter, kind in LETTERS.items())
        raise ConfigError(f"config.json: hybrid_override_pattern={pattern!r} must be made of {letters}")
    return [LETTERS[letter] for letter in pattern]


def _mamba(c: Fields) -> Mamba2:
    return Mamba2(
        num_heads=c.whole("mamba_num_heads"),
        head_dim=c.whole("mamba_head_dim"),
        num_groups=c.whole("n_groups"),
        state_size=c.whole("ssm_state_size"),
        conv_kernel=c.whole("conv_kernel", at_least=2),
        conv_bias=c.flag("use_conv_bias"),
        in_bias=c.flag("use_bias"),
        out_bias=c.flag("use_bias"),
    )


def _mlp(c: Fields, module: str, intermediate_size: int) -> _shapes.Shapes:
    hidden_size, bias = c.whole("hidden_size"), c.flag("mlp_bias")
    yield from _shapes.linear(f"{module}.up_proj", intermediate_size, hidden_size, bias=bias)
    yield from _shapes.linear(f"{module}.down_proj", hidden_size, intermediate_size, bias=bias)


def _experts(c: Fields, module: str) -> _shapes.Shapes:
    """Yield (tensor name, shape) of the experts, which may work in a space smaller than the residual stream."""
    num_experts, size = c.whole("n_routed_experts"), c.whole("moe_intermediate_size")
    hidden_size, bias, latent = c.whole("hidden_size"), c.flag("mlp_bias"), c.whole_or_none("moe_latent_size")
    width = latent or hidden_size
    yield f"{module}.experts.up_proj", (num_experts, size, width)
    yield f"{module}.experts.down_proj", (num_experts, width, size)
    yield f"{module}.gate.weight", (num_experts, hidden_size)
    yield from _mlp(c, f"{module}.shared_experts", c.whole("moe_shared_expert_intermediate_size"))
    if latent:
        yield from _shapes.linear(f"{module}.fc1_latent_proj", latent, hidden_size, bias=bias)
        yield from _shapes.linear(f"{module}.fc2_latent_proj", hidden_size, latent, bias=bias)
