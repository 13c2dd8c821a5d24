"""What `build` is given, typed or as text from a command line -> the options of engines and servers."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from girih.config import EngineConfig
from girih.errors import ConfigError
from girih.server.config import ServerConfig
from girih.units import parse_bytes

_ROUTER = "replicas publish their events to the router of the application itself"

ELSEWHERE = {
    "host": "Ray Serve listens: serve run, or http_options in its config file, say where",
    "port": "Ray Serve listens: serve start --http-port, or http_options in its config file, say where",
    "log_format": "Ray Serve writes the logs: see its logging_config",
    "kv_events": _ROUTER,
    "kv_events_endpoint": _ROUTER,
    "kv_events_replay_endpoint": _ROUTER,
    "kv_events_topic": _ROUTER,
}
"""Options of one server that have no meaning here -> why."""

KEYS_VARIABLE = "GIRIH_API_KEY"


@dataclass(frozen=True)
class Options:
    """What all parts of the application know.

    Args:
        engine: of each replica.
        server: of each replica and of what is in front of them.
        model_name: what requests may call the model.
        num_replicas: engines.
        num_cpus: of each replica: what Ray counts, and the threads that it computes on.
    """

    engine: EngineConfig
    server: ServerConfig
    model_name: str
    num_replicas: int
    num_cpus: float

    @classmethod
    def parse(cls, args: Mapping[str, Any]) -> Options:
        """Read options.

        Raises:
            ConfigError: one that is not known, or a value that cannot be used.
        """
        engine_types, server_types = get_type_hints(EngineConfig), get_type_hints(ServerConfig)
        own_types = {"num_replicas": int, "num_cpus": float, "kv_cache_memory": Any}
        types = {**engine_types, **server_types, **own_types}
        values = {name: _value(name, value, types) for name, value in args.items()}
        if not values.get("model"):
            raise ConfigError("give model: a directory in Hugging Face format, a .gguf file, or a name of `girih pull`")
        if (size := values.pop("kv_cache_memory", None)) is not None:
            values["kv_cache_memory_bytes"] = parse_bytes(size)
        values.setdefault("api_key", tuple(os.environ.get(KEYS_VARIABLE, "").split()))
        num_replicas, num_cpus = values.get("num_replicas", 1), values.get("num_cpus", 1.0)
        if num_replicas < 1 or num_cpus <= 0:
            raise ConfigError(f"num_replicas={num_replicas} must be at least 1, and num_cpus={num_cpus:g} above 0")
        engine = EngineConfig(**{name: value for name, value in values.items() if name in engine_types})
        server = ServerConfig(**{name: value for name, value in values.items() if name in server_types})
        engine = dataclasses.replace(engine, kv_events=engine.enable_prefix_caching)
        return cls(engine, server, values["model"], num_replicas, num_cpus)


def _value(name: str, value: Any, types: Mapping[str, Any]) -> Any:
    if name in ELSEWHERE:
        raise ConfigError(f"{name} is no option of replicas: {ELSEWHERE[name]}")
    if name not in types:
        close = difflib.get_close_matches(name, types, n=1)
        raise ConfigError(f"there is no option {name!r}; " + (f"did you mean {close[0]}?" if close else "see the docs"))
    kind = types[name]
    if isinstance(value, str):
        if get_origin(kind) is tuple or "tuple" in str(kind):
            value = value.split(",")
        elif name == "max_model_len" and value.isdecimal():  # else text, as "auto" is one
            value = int(value)
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{name}={value!r} cannot be used: {error.errors()[0]['msg']}") from None
