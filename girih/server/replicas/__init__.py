"""Several engines behind one address, as a Ray Serve application; every request goes where its prompt is cached.

client ── HTTP ──> Serve's proxy ──> Ingress: Gate, tokens of the prompt ──> PrefixRouter ──> Replica: the whole server
                                                                                 ^               AsyncLLM, its engine
                                                                                 └── KV events ──────────┘

serve run girih.server.replicas:build model=smollm2 num_replicas=2 kv_cache_memory=1GiB
"""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from girih.server.replicas.ingress import Ingress
from girih.server.replicas.options import Options
from girih.server.replicas.replica import Replica

MAX_ONGOING_REQUESTS = 1_000_000
"""None of Serve's own: replicas themselves refuse what is too much, with 429, as one server does."""

STATS_PERIOD_S = 1.0
"""How soon routers learn where a new replica publishes its events."""

HEALTH_PERIOD_S = 2.0


def build(args: dict[str, Any]) -> serve.Application:
    """Return the application, for `serve run`, `serve.run` and Serve's config files.

    Args:
        args: options of `girih serve` with underscores, `num_replicas` and `num_cpus` (of each); see docs/replicas.md.

    Raises:
        ConfigError: an option that is not known, or a value that cannot be used.
    """
    options = Options.parse(args)
    replica = serve.deployment(
        num_replicas=options.num_replicas,
        ray_actor_options={"num_cpus": options.num_cpus},
        health_check_period_s=HEALTH_PERIOD_S,
        request_router_config=RequestRouterConfig(
            request_router_class="girih.server.replicas.router:PrefixRouter",  # type: ignore[arg-type]
            request_routing_stats_period_s=STATS_PERIOD_S,  # type: ignore[arg-type]
        ),
        **_common(options),
    )(Replica)
    ingress = serve.deployment(ray_actor_options={"num_cpus": 0}, **_common(options))(Ingress)
    return ingress.bind(replica.bind(options), options)


def _common(options: Options) -> dict[str, Any]:
    return {
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        "graceful_shutdown_wait_loop_s": 0.2,
        "graceful_shutdown_timeout_s": options.server.shutdown_timeout_s,
    }
