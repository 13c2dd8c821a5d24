"""One file per kind of cache: its spec, its retention and its `EXAMPLES`. The file's name is the kind.

Every file defines
    SPEC        the `KVCacheSpec` class, with `kind` equal to the file's name;
    RETENTION   the `Retention` class, with the same `kind`; left out where the kind keeps tokens as another kind does;
    EXAMPLES    a tuple of specs that the conformance tests run through every rule.
Nothing is registered: a new file is a new kind.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from girih import plugins
from girih.errors import PlanError
from girih.kv.retention import Retention
from girih.kv.spec import KVCacheSpec


def spec_to_json(spec: KVCacheSpec) -> dict[str, Any]:
    """Return {"kind": ..., plus the spec's fields}; the inverse is `spec_from_json`."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    inner = {name: spec_to_json(value) for name, value in values.items() if isinstance(value, KVCacheSpec)}
    return {"kind": spec.kind, **values, **inner}


def spec_from_json(data: dict[str, Any]) -> KVCacheSpec:
    """Make the spec that `spec_to_json` wrote.

    Args:
        data: {"kind": name of a file in this package, plus the fields}.

    Raises:
        ConfigError: an unknown kind; the message lists those there are.
        PlanError: fields are missing or unknown.
    """
    inner = {name: spec_from_json(value) for name, value in data.items() if isinstance(value, dict)}
    return _from_json({**data, **inner}, "SPEC", "cache spec")


def retention_from_json(data: dict[str, Any]) -> Retention:
    """Make the retention that `Retention.to_json` wrote.

    Args:
        data: {"kind": name of a file in this package, plus the fields}.

    Raises:
        ConfigError: an unknown kind; the message lists those there are.
        PlanError: fields are missing or unknown.
    """
    return _from_json(data, "RETENTION", "cache retention")


def _from_json(data: dict[str, Any], attribute: str, what: str) -> Any:
    values = dict(data)
    kind = values.pop("kind", None)
    if not isinstance(kind, str):
        raise PlanError(f'a {what} in JSON needs "kind", got only {", ".join(data) or "nothing"}')
    make = getattr(plugins.load("girih.kv.specs", kind, what=what), attribute, None)
    if make is None:
        raise PlanError(f"there is no {what} {kind!r}: layers of that kind keep tokens as layers of another kind do")
    known = {field.name for field in fields(make)}
    if unknown := sorted(values.keys() - known):
        raise PlanError(
            f"{what} {kind!r} has no {', '.join(unknown)}; it takes {', '.join(sorted(known)) or 'nothing'}"
        )
    try:
        return make(**values)
    except TypeError as error:
        raise PlanError(f"{what} {kind!r} cannot be made from {values}: {error}") from error
