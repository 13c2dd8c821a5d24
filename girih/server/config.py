"""`ServerConfig`: the options of `girih serve` beside the engine's, frozen and checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from girih.errors import ConfigError

MAX_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How the server listens, whom it lets in, and what it takes.

    Args:
        host: address to listen on; 0.0.0.0 lets other machines in.
        port: to listen on; 0 takes a free one.
        served_model_name: names that requests may call the model by, the first is shown; else the MODEL given.
        chat_template: a file with a Jinja chat template, instead of the model's own.
        api_key: a key that clients must send; can be given several times. Each key has a prefix cache of its own.
        public_dashboard: show the live page, metrics and KV events to everybody although there are API keys.
        restart_engine: when the engine's process dies, start another and compute again what was not shown to anybody.
        health_timeout_s: /health fails when work has waited so many seconds without a completed step.
        shutdown_timeout_s: seconds that requests have to finish after SIGTERM; a second signal ends them at once.
        max_waiting: sequences that may wait beside those that run; beyond it requests are refused with 429.
        max_body_bytes: the largest body of a request.
        max_n: the most completions of one prompt.
        max_prompts: the most prompts of one request.
        max_logprobs: the most likely tokens that a request may ask for per position.
        log_format: of the server's log lines: "text" or "json".
        kv_events_endpoint: where to publish what becomes of cached prefixes, such as tcp://*:5557; for routers.
        kv_events_replay_endpoint: where routers can ask for events that they missed, such as tcp://*:5558.
        kv_events_topic: of these events, which subscribers choose.
        otlp_endpoint: URL that OpenTelemetry traces are sent to, such as http://localhost:4318/v1/traces.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    chat_template: Path | None = None
    api_key: tuple[str, ...] = ()
    public_dashboard: bool = False
    restart_engine: bool = False
    health_timeout_s: float = 30.0
    shutdown_timeout_s: float = 60.0
    max_waiting: int = 1024
    max_body_bytes: int = 8 << 20
    max_n: int = 64
    max_prompts: int = 256
    max_logprobs: int = 20
    log_format: str = "text"
    kv_events_endpoint: str | None = None
    kv_events_replay_endpoint: str | None = None
    kv_events_topic: str = ""
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        """Refuse values out of range, naming option and range."""
        if not 0 <= self.port <= MAX_PORT:
            raise ConfigError(f"port={self.port!r} must be from 0 to {MAX_PORT}")
        for name in ("health_timeout_s", "shutdown_timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be a number of seconds above 0")
        for name in ("max_body_bytes", "max_n", "max_prompts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be at least 1")
        for name in ("max_waiting", "max_logprobs"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be at least 0")
        if self.log_format not in ("text", "json"):
            raise ConfigError(f"log_format={self.log_format!r} is not known; choose text or json")
        if self.kv_events_replay_endpoint and not self.kv_events_endpoint:
            raise ConfigError("--kv-events-replay-endpoint is of use only with --kv-events-endpoint")
        if not all(self.api_key) or not all(key.isascii() and key.isprintable() for key in self.api_key):
            raise ConfigError("an API key must be printable ASCII text and not empty")
