"""Reading config.json: checked fields, and rotary embeddings in both formats that Hugging Face has used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from girih.errors import ConfigError

MAX_INT = 1 << 31  # no field of a real model comes near; what is made per layer, head or token stays countable
MAX_LAYERS = 10_000


@dataclass(frozen=True)
class RopeParameters:
    """Rotary embedding of one kind of layer.

    The last three are set for "llama3" only, where long wavelengths are divided by `factor`, short ones kept and
    those between blended (Llama 3.1); "linear" divides all of them.

    Args:
        rope_type: "default", "linear" or "llama3".
        rope_theta: base of the wavelengths.
        factor: how many times longer the context is than the trained one; 1.0 for "default".
        low_freq_factor: wavelengths above original_max_position_embeddings / this are divided.
        high_freq_factor: wavelengths below original_max_position_embeddings / this are kept.
        original_max_position_embeddings: trained context in tokens.
    """

    rope_type: str
    rope_theta: float
    factor: float = 1.0
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None


def read_int(config: Mapping[str, Any], name: str, default: int, at_most: int = MAX_INT, at_least: int = 1) -> int:
    """Return a whole number of config.json; a missing or null field is the default.

    Raises:
        ConfigError: not a whole number from `at_least` to `at_most`; the message names the field.
    """
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
        raise ConfigError(f"config.json: {name}={value!r} must be a whole number from {at_least} to {at_most}")
    return value


def read_float(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Return a positive number of config.json; a missing or null field is the default.

    Raises:
        ConfigError: not a positive number, or missing without a default; the message names the field.
    """
    value = config.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ConfigError(f"config.json: {name}={value!r} must be a number above 0")
    return float(value)


def read_bool(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return a flag of config.json; a missing or null field is the default.

    Raises:
        ConfigError: neither true nor false; the message names the field.
    """
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"config.json: {name}={value!r} must be true or false")
    return value


def read_choice(config: Mapping[str, Any], name: str, default: str, choices: tuple[str, ...]) -> str:
    """Return a name of config.json that must be one of those supported; a missing or null field is the default.

    Raises:
        ConfigError: not supported; the message lists what is.
    """
    value = config.get(name)
    if value is None:
        value = default
    if value not in choices:
        raise ConfigError(f"config.json: {name}={value!r} is not supported; supported: {', '.join(choices)}")
    return value


def refuse_features(config: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Refuse a model that uses a feature which would change its results and is not built.

    Args:
        config: config.json.
        names: fields that must be missing, null, false or 0.

    Raises:
        ConfigError: one is set; the message names it and its value.
    """
    for name in names:
        if config.get(name):
            raise ConfigError(f"config.json: {name}={config[name]!r} is not supported for this model; it must be unset")


def check_heads(num_attention_heads: int, num_key_value_heads: int, head_dim: int) -> None:
    """Refuse head counts that grouped-query attention with rotary embeddings cannot use.

    Raises:
        ConfigError: query heads are no multiple of key/value heads, or the head size is odd.
    """
    if num_attention_heads % num_key_value_heads:
        raise ConfigError(
            f"config.json: num_attention_heads={num_attention_heads} must be a multiple of "
            f"num_key_value_heads={num_key_value_heads}"
        )
    if head_dim % 2:
        raise ConfigError(f"config.json: head_dim={head_dim} must be even: rotary embeddings turn pairs")


def rope_parameters(values: Mapping[str, Any], default_theta: float, max_position_embeddings: int) -> RopeParameters:
    """Read one rotary embedding, as in `rope_parameters` (transformers 5) or `rope_scaling` (before).

    Args:
        values: "rope_type" (or "type"), "rope_theta" and the fields of that type.
        default_theta: the base when `values` has none.
        max_position_embeddings: the trained context when "llama3" does not give its own.

    Raises:
        ConfigError: an unknown type, a missing field, or one out of range; the message names it.
    """
    partial = values.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ConfigError(f"config.json: partial_rotary_factor={partial!r} is not supported; it must be 1.0")
    named = {"rope_type": values.get("rope_type", values.get("type"))}
    rope_type = read_choice(named, "rope_type", "default", ("default", "linear", "llama3"))
    theta = read_float(values, "rope_theta", default_theta)
    if rope_type == "default":
        return RopeParameters(rope_type, theta)
    factor = read_float(values, "factor")
    if rope_type == "linear":
        return RopeParameters(rope_type, theta, factor)
    low, high = read_float(values, "low_freq_factor"), read_float(values, "high_freq_factor")
    if high <= low:
        raise ConfigError(f"config.json: high_freq_factor={high} must be above low_freq_factor={low}")
    trained = read_int(values, "original_max_position_embeddings", max_position_embeddings)
    return RopeParameters(rope_type, theta, factor, low, high, trained)


def as_dict(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return an object of config.json, empty when it is missing or null.

    Raises:
        ConfigError: not an object; the message names the field.
    """
    value = config.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"config.json: {name}={value!r} must be an object")
    return dict(value or {})
