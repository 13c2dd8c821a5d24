"""config.json together with a family's defaults, read field by field and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from girih.arch._common import MAX_INT, MAX_LAYERS, read_bool, read_choice, read_float, read_int
from girih.errors import ConfigError


class Fields:
    """The fields of config.json: one that is missing has the family's default, one that is null stays null.

    Args:
        config: config.json.
        defaults: of the family, as transformers' configuration class has them; a field without one must be given.
    """

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]):
        self._values = {**defaults, **config}

    def has(self, name: str) -> bool:
        """Tell whether config.json or the defaults have the field, be it null."""
        return name in self._values

    def is_null(self, name: str) -> bool:
        """Tell whether a field is null, or missing without a default."""
        return self._values.get(name) is None

    def whole(self, name: str, *, if_null: int | None = None, at_least: int = 1, at_most: int = MAX_INT) -> int:
        """Return a whole number.

        Args:
            name: the field.
            if_null: what null stands for; None refuses it.
            at_least: the least that is accepted.
            at_most: the most that is accepted.

        Raises:
            ConfigError: null, no whole number or out of range; the message names the field.
        """
        self._refuse_null(name, if_null)
        return read_int(self._values, name, if_null or 0, at_most, at_least)

    def whole_or_none(self, name: str, *, at_least: int = 1) -> int | None:
        """Return a whole number, or None for null; otherwise as `whole`."""
        return None if self.is_null(name) else self.whole(name, at_least=at_least)

    def num_layers(self, name: str = "num_hidden_layers") -> int:
        """Return a number of layers, at most `MAX_LAYERS`."""
        return self.whole(name, at_most=MAX_LAYERS)

    def number(self, name: str) -> float:
        """Return a number above 0.

        Raises:
            ConfigError: null, or no such number; the message names the field.
        """
        return read_float(self._values, name)

    def flag(self, name: str) -> bool:
        """Return true or false; null is false.

        Raises:
            ConfigError: neither; the message names the field.
        """
        return read_bool(self._values, name, False)

    def wholes(self, name: str) -> tuple[int, ...]:
        """Return a list of whole numbers from 0; null is an empty one.

        Raises:
            ConfigError: no such list; the message names the field.
        """
        values = self._values.get(name)
        if values is None:
            return ()
        if not isinstance(values, (list, tuple)) or any(type(value) is not int or value < 0 for value in values):
            raise ConfigError(f"config.json: {name}={values!r} must be a list of whole numbers")
        return tuple(values)

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """Return a name that must be one of those supported.

        Raises:
            ConfigError: another one; the message lists what is supported.
        """
        return read_choice(self._values, name, "", choices)

    def per_layer(
        self, name: str, num_layers: int, known: Sequence[str], default: Callable[[int], str]
    ) -> tuple[str, ...]:
        """Return a kind for each layer.

        Args:
            name: the field, e.g. "layer_types".
            num_layers: how many the list must have.
            known: the kinds that are supported.
            default: layer index -> kind, where the field is null.

        Raises:
            ConfigError: another number of kinds, or one that is not known; the message names it.
        """
        kinds = self._values.get(name)
        if kinds is None:
            return tuple(default(index) for index in range(num_layers))
        if not isinstance(kinds, (list, tuple)) or len(kinds) != num_layers:
            raise ConfigError(f"config.json: {name} must list one type for each of the {num_layers} layers")
        if unknown := sorted({str(kind) for kind in kinds} - set(known)):
            raise ConfigError(f"config.json: {name} has {', '.join(unknown)}; supported: {', '.join(known)}")
        return tuple(kinds)

    def _refuse_null(self, name: str, if_null: int | None) -> None:
        if if_null is None and self._values.get(name) is None:
            raise ConfigError(f"config.json: {name} is missing or null; it must be a whole number")
