"""Counts and times for Prometheus: under vLLM's names where they mean the same, so that its dashboards work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from girih.engine.async_llm import AsyncLLM
from girih.engine.timings import FinishedRequest
from girih.errors import GirihError

STATS_TIMEOUT_S = 2.0
"""How long a scrape waits for an engine that is in the middle of a step; then the numbers are those of before."""

DRAIN_EVERY_S = 5.0

FAST_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
SLOW_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
TOKENS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))
COMPLETIONS = (1.0, 2.0, 5.0, 10.0, 20.0)


@dataclass
class Histogram:
    """How often values were at most so large.

    Args:
        name: of the metric.
        text: what it is.
        buckets: upper limits, in order.
    """

    name: str
    text: str
    buckets: tuple[float, ...]
    total: float = 0.0
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Start with zeros; the last one is of what is larger than all limits."""
        self.counts = [0] * (len(self.buckets) + 1)

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[next((i for i, limit in enumerate(self.buckets) if value <= limit), len(self.buckets))] += 1
        self.total += value

    def metric(self, labels: Mapping[str, str]) -> Metric:
        """Return it for Prometheus."""
        family = HistogramMetricFamily(self.name, self.text, labels=tuple(labels))
        rows, count = [], 0
        for limit, own in zip((*map(str, self.buckets), "+Inf"), self.counts, strict=True):
            count += own
            rows.append((limit, count))
        family.add_metric(tuple(labels.values()), rows, self.total)
        return family


class Metrics:
    """The metrics of one server.

    Args:
        engine: what is measured.
        model_name: a label of all metrics.
        engine_name: another one, which tells replicas apart.
    """

    def __init__(self, engine: AsyncLLM, model_name: str, engine_name: str = "0"):
        self._engine = engine
        self._labels = {"model_name": model_name, "engine": engine_name}
        self._stats: Any = None  # of the engine, as of the last scrape
        self._num_prompt_tokens = self._num_output_tokens = 0
        self._ended: dict[str, int] = {}
        self._first, self._between, self._per_token, self._total, self._queue, self._prefill, self._decode = (
            Histogram(f"vllm:{name}_seconds", text, buckets)
            for name, text, buckets in (
                ("time_to_first_token", "From arrival to the first token", FIRST_S),
                ("inter_token_latency", "Between two tokens", FAST_S),
                ("request_time_per_output_token", "Of a request, per token after the first", FAST_S),
                ("e2e_request_latency", "From arrival to the end", SLOW_S),
                ("request_queue_time", "Until a request is let in", SLOW_S),
                ("request_prefill_time", "From then to the first token", SLOW_S),
                ("request_decode_time", "From the first token to the end", SLOW_S),
            )
        )
        self._prompt, self._output, self._max_tokens, self._n = (
            Histogram(f"vllm:{name}", text, buckets)
            for name, text, buckets in (
                ("request_prompt_tokens", "Tokens of a request's prompt", TOKENS),
                ("request_generation_tokens", "Tokens of a request's output", TOKENS),
                ("request_params_max_tokens", "Output tokens asked for", TOKENS),
                ("request_params_n", "Completions asked for", COMPLETIONS),
            )
        )
        self._registry = CollectorRegistry()
        self._registry.register(self)  # a collector is what has `collect`

    async def keep_up(self) -> None:
        """Take note of what has happened now and then, so that nothing piles up between scrapes; never ends."""
        while True:
            await asyncio.sleep(DRAIN_EVERY_S)
            self._drain()

    def num_output_tokens(self) -> int:
        """Return the tokens of output since start-up."""
        self._drain()
        return self._num_output_tokens

    async def text(self) -> tuple[str, str]:
        """Return all metrics as Prometheus reads them, and the media type of that."""
        self._drain()
        with contextlib.suppress(GirihError, TimeoutError):  # it is busy, or gone: health says so
            self._stats = await asyncio.wait_for(self._engine.call("stats"), STATS_TIMEOUT_S)
        return exposition.generate_latest(self._registry).decode(), exposition.CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; called by the Prometheus client."""
        histograms = (
            self._first, self._between, self._per_token, self._total, self._queue, self._prefill, self._decode,
            self._prompt, self._output, self._max_tokens, self._n,
        )  # fmt: skip
        for histogram in histograms:
            yield histogram.metric(self._labels)
        yield self._counter("vllm:prompt_tokens", "Tokens of prompts that have ended", self._num_prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens of output", self._num_output_tokens)
        ended = CounterMetricFamily(
            "vllm:request_success", "Requests that have ended", labels=(*self._labels, "finished_reason")
        )
        for reason in ("stop", "length", "abort", "error"):
            ended.add_metric((*self._labels.values(), reason), self._ended.get(reason, 0))
        yield ended
        yield self._counter("girih:engine_restarts", "Engines started in place of dead ones", self._engine.num_restarts)
        yield self._gauge("girih:engine_up", "1 while there is an engine", int(self._engine.is_up))
        if self._stats is not None:
            yield from self._of_engine(self._stats)

    def _of_engine(self, stats: Any) -> Iterator[Metric]:
        cache = stats.cache
        yield self._gauge("vllm:num_requests_running", "Sequences that are computed", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences that wait", stats.num_waiting)
        reasons = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Sequences that wait, by why", labels=(*self._labels, "reason")
        )
        for reason, number in stats.waiting_by_reason.items():
            reasons.add_metric((*self._labels.values(), reason), number)
        yield reasons
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of slabs with a page in use, 0 to 1", stats.kv_cache_usage)
        yield self._counter("vllm:num_preemptions", "Sequences that lost their pages", stats.num_preemptions)
        yield self._counter("vllm:prefix_cache_queries", "Tokens looked up in the cache", cache.tokens_looked_up)
        yield self._counter("vllm:prefix_cache_hits", "Tokens found in the cache", cache.tokens_hit)
        yield self._counter("girih:steps", "Steps of the engine", stats.num_steps)
        yield self._counter("girih:worker_restarts", "Workers started in place of failed ones", stats.num_restarts)
        yield self._counter("girih:pages_evicted", "Cached pages given up for others", cache.pages_evicted)
        yield self._counter("girih:pages_moved", "Pages that changed place to empty a slab", cache.pages_moved)
        yield self._counter("girih:moved_bytes", "Bytes of these pages", stats.moved_bytes)
        lost = CounterMetricFamily(
            "girih:cache_tokens_lost", "Tokens that could have been reused, but for a missing piece",
            labels=(*self._labels, "missing"),
        )  # fmt: skip
        lost.add_metric((*self._labels.values(), "state"), cache.tokens_lost_to_state)
        lost.add_metric((*self._labels.values(), "window"), cache.tokens_lost_to_window)
        yield lost
        yield from self._of_pool(cache)

    def _of_pool(self, cache: Any) -> Iterator[Metric]:
        slabs = GaugeMetricFamily("girih:slabs", "Slabs by who has borrowed them", labels=(*self._labels, "group"))
        slabs.add_metric((*self._labels.values(), "free"), cache.num_free_slabs)
        pages = GaugeMetricFamily("girih:pages", "Pages of borrowed slabs", labels=(*self._labels, "group", "state"))
        for group, num_slabs in enumerate(cache.slabs):
            slabs.add_metric((*self._labels.values(), str(group)), num_slabs)
            for state in ("free", "cached", "referenced"):
                value = getattr(cache, f"{state}_pages")[group]
                pages.add_metric((*self._labels.values(), str(group), state), value)
        yield slabs
        yield pages
        free, all_pages = sum(cache.free_pages), sum((*cache.free_pages, *cache.cached_pages, *cache.referenced_pages))
        yield self._gauge(
            "girih:pool_fragmentation", "Share of the pages of borrowed slabs that hold nothing",
            free / all_pages if all_pages else 0.0,
        )  # fmt: skip

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), value)
        return family

    def _drain(self) -> None:
        timings = self._engine.take_timings()
        for seconds in timings.first_token_s:
            self._first.add(seconds)
        for seconds in timings.inter_token_s:
            self._between.add(seconds)
        self._num_output_tokens += len(timings.first_token_s) + len(timings.inter_token_s)
        for request in timings.finished:
            self._add_finished(request)

    def _add_finished(self, request: FinishedRequest) -> None:
        self._ended[request.reason] = self._ended.get(request.reason, 0) + 1
        self._num_prompt_tokens += request.num_prompt_tokens
        self._total.add(request.total_s)
        self._queue.add(request.queue_s)
        if request.prefill_s is not None and request.decode_s is not None:
            self._prefill.add(request.prefill_s)
            self._decode.add(request.decode_s)
            per_completion = request.num_output_tokens / request.num_completions
            if per_completion > 1:
                self._per_token.add(request.decode_s / (per_completion - 1))
        self._prompt.add(request.num_prompt_tokens)
        self._output.add(request.num_output_tokens)
        self._n.add(request.num_completions)
        if request.max_tokens is not None:
            self._max_tokens.add(request.max_tokens)
