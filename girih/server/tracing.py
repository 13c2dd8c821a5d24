"""OpenTelemetry traces: a span for each request, with the attributes that OpenTelemetry names for generative AI."""

from __future__ import annotations

import time
from collections.abc import Mapping

from girih.engine.live_request import LiveRequest
from girih.errors import ConfigError


class Tracer:
    """Sends spans to a collector, in a thread of its own; one that does not answer holds nothing up.

    Args:
        endpoint: URL of a collector's OTLP/HTTP traces, such as http://localhost:4318/v1/traces.
        model_name: of the model.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str, model_name: str):
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(f"traces need OpenTelemetry: pip install 'girih[otel]' ({error})") from error
        self._model_name = model_name
        self._provider = TracerProvider(resource=Resource.create({"service.name": "girih"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("girih.server")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, operation: str, request_id: str, lives: list[LiveRequest], headers: Mapping[str, str]) -> None:
        """Record one request that has ended.

        Args:
            operation: "chat" or "text_completion".
            request_id: of the answer.
            lives: what it asked of the engine; at least one, all have ended.
            headers: of the HTTP request, in lower case; its `traceparent` is what the span belongs to.
        """
        now_s, now_ns = time.monotonic(), time.time_ns()
        times = [live.times(now_s) for live in lives]
        params = lives[0].params
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.id": request_id,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.input_tokens": sum(time.num_prompt_tokens for time in times),
            "gen_ai.usage.output_tokens": sum(time.num_output_tokens for time in times),
            "gen_ai.usage.cache_read.input_tokens": sum(live.output.num_cached_tokens for live in lives),
            "gen_ai.response.finish_reasons": [
                output.finish_reason or "abort" for live in lives for output in live.output.outputs
            ],
            "girih.queue_s": max(time.queue_s for time in times),
        }
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        to_first_token_s = [time.queue_s + time.prefill_s for time in times if time.prefill_s is not None]
        if to_first_token_s:
            attributes["gen_ai.server.time_to_first_token"] = min(to_first_token_s)
        start_ns = now_ns - int(max(time.total_s for time in times) * 1e9)
        context = self._propagator.extract(dict(headers))
        span = self._tracer.start_span(f"{operation} {self._model_name}", context, start_time=start_ns)
        span.set_attributes(attributes)  # type: ignore[arg-type]
        span.end(now_ns)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()
