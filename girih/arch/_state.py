"""What families with recurrent layers have in common: which layers they are, what states they keep, their tensors.

Tensor-parallel ranks share out the heads of a recurrent layer, and with them the states; what several heads have in
common (B and C of a Mamba group) goes to every rank that has one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from girih.arch import CacheDtypes, _shapes
from girih.arch._attention import FULL
from girih.arch._fields import Fields
from girih.errors import ConfigError
from girih.kv.spec import KVCacheSpec
from girih.kv.specs.state import StateSpec

LINEAR, CONV = "linear_attention", "conv"  # as "layer_types" has them
_OLDER_KINDS = {"mamba": LINEAR, "attention": FULL}
MAMBA2_DEFAULTS = {  # of what `read_mamba2` reads: the same in every family that has these names
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
}  # fmt: skip


def hybrid_kinds(c: Fields, name: str, default: Callable[[int], str], others: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return FULL, LINEAR or one of `others` for each layer, also where it has the older name "attention" or "mamba".

    Args:
        c: "num_hidden_layers" and `name` are read.
        name: the field, e.g. "layer_types".
        default: layer index -> kind, where the field is null.
        others: kinds that the family has besides.

    Raises:
        ConfigError: another number of kinds, or one that is not known; the message names it.
    """
    kinds = c.per_layer(name, c.num_layers(), (FULL, LINEAR, *others, *_OLDER_KINDS), default)
    return tuple(_OLDER_KINDS.get(kind, kind) for kind in kinds)


def read_fields(
    config: Mapping[str, Any], defaults: Mapping[str, Any], new_names: Mapping[str, str] | None = None
) -> Fields:
    """Return the fields of config.json; "auto" is null.

    Args:
        config: config.json.
        defaults: of the family.
        new_names: older name of a field -> name of today; the older one wins, as in transformers.
    """
    values = {**defaults, **config, **{new: config[old] for old, new in (new_names or {}).items() if old in config}}
    return Fields({name: None if value == "auto" else value for name, value in values.items()}, {})


def rename(shapes: Mapping[str, tuple[int, ...]], old: str, new: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes under names in which `old`, e.g. "model.norm.", is replaced by `new`."""
    return {name.replace(old, new): shape for name, shape in shapes.items()}


def hybrid_specs(
    kinds: Sequence[str], attention: KVCacheSpec, state: KVCacheSpec, state_module: str
) -> dict[str, KVCacheSpec]:
    """Return what each layer caches, by layer name, in model order.

    Args:
        kinds: of each layer: FULL, or another kind with a state.
        attention: of "model.layers.N.self_attn".
        state: of the others.
        state_module: their name, e.g. "mamba" for "model.layers.N.mamba".
    """
    return {
        f"model.layers.{index}.{'self_attn' if kind == FULL else state_module}": attention if kind == FULL else state
        for index, kind in enumerate(kinds)
    }


@dataclass(frozen=True)
class Mamba2:
    """Sizes and options of a Mamba 2 layer (Dao and Gu, "Transformers are SSMs", 2024).

    Args:
        num_heads: heads, each with a state (head_dim, state_size).
        head_dim: channels of a head.
        num_groups: groups of heads with the same B and C.
        state_size: elements of the state per channel.
        conv_kernel: tokens that the convolution reads, the newest included.
        conv_bias: the convolution has a bias.
        in_bias: the input projection has one.
        out_bias: the output projection has one.
        norm: there is a norm before the output projection.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_kernel: int
    conv_bias: bool
    in_bias: bool
    out_bias: bool
    norm: bool = True

    @property
    def intermediate_size(self) -> int:
        """Return the channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Return the channels of the convolution: those of the heads, then B and C of all groups."""
        return self.intermediate_size + 2 * self.num_groups * self.state_size

    def state_spec(self, dtypes: CacheDtypes, block_size_multiple: int) -> StateSpec:
        """Return the cache: the last conv_kernel - 1 inputs of the convolution, and each head's state."""
        group = (self.num_groups * self.state_size, self.num_groups)
        return StateSpec(
            shapes=((self.conv_dim, self.conv_kernel - 1), (self.num_heads, self.head_dim, self.state_size)),
            dtypes=(dtypes.activation, dtypes.state),
            segments=(((self.intermediate_size, self.num_heads), group, group), ((self.num_heads, self.num_heads),)),
            block_size_multiple=block_size_multiple,
        )

    def weight_shapes(self, module: str, hidden_size: int) -> _shapes.Shapes:
        """Yield (tensor name, shape) of layer `module`, e.g. "model.layers.3.mamba", on a stream of `hidden_size`."""
        for name in ("dt_bias", "A_log", "D"):
            yield f"{module}.{name}", (self.num_heads,)
        yield from conv1d(f"{module}.conv1d", self.conv_dim, self.conv_kernel, bias=self.conv_bias)
        projected = self.intermediate_size + self.conv_dim + self.num_heads
        yield from _shapes.linear(f"{module}.in_proj", projected, hidden_size, bias=self.in_bias)
        if self.norm:
            yield f"{module}.norm.weight", (self.intermediate_size,)
        yield from _shapes.linear(f"{module}.out_proj", hidden_size, self.intermediate_size, bias=self.out_bias)


def read_mamba2(c: Fields, channels: int | None = None) -> Mamba2:
    """Read the fields "mamba_..."; both projections have a bias or none.

    Args:
        c: the fields, with `MAMBA2_DEFAULTS`.
        channels: that the heads must make up; None: "mamba_expand" times "hidden_size".

    Raises:
        ConfigError: a field that is wrong, or heads that do not make up the channels.
    """
    channels = channels or c.whole("mamba_expand") * c.whole("hidden_size")
    num_heads, bias = c.whole("mamba_n_heads"), c.flag("mamba_proj_bias")
    head_dim = c.whole("mamba_d_head", if_null=channels // num_heads)
    if num_heads * head_dim != channels:
        raise ConfigError(
            f"config.json: mamba_n_heads={num_heads} of mamba_d_head={head_dim} do not make up the "
            f"{channels} channels of a Mamba layer"
        )
    return Mamba2(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=c.whole("mamba_n_groups"),
        state_size=c.whole("mamba_d_state"),
        conv_kernel=c.whole("mamba_d_conv", at_least=2),
        conv_bias=c.flag("mamba_conv_bias"),
        in_bias=bias,
        out_bias=bias,
    )


def conv1d(module: str, channels: int, kernel_size: int, *, bias: bool) -> _shapes.Shapes:
    """Yield (tensor name, shape) of a convolution over tokens, each channel on its own."""
    yield f"{module}.weight", (channels, 1, kernel_size)
    if bias:
        yield f"{module}.bias", (channels,)
