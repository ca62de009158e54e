"""Prometheus metrics of a server; the workers' own figures are read when somebody asks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..types import Event, Failed, Finished, Token
from .pool import Served

__all__ = ["Metrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """All metrics of one server.

    Args:
        loaded: the models that are loaded now.
    """

    def __init__(self, loaded: Callable[[], Iterable[Served]]) -> None:
        registry = self._registry = CollectorRegistry()
        names = ("model",)
        self.requests = Counter(
            "llamaherd_requests", "Requests that ended, by how.", ("model", "outcome"), registry=registry
        )
        self.http = Counter(
            "llamaherd_http_responses", "HTTP responses.", ("path", "status"), registry=registry
        )
        self.open = Gauge("llamaherd_requests_open", "Requests that run or wait.", names, registry=registry)
        self.first_token = Histogram(
            "llamaherd_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            names,
            buckets=_SECONDS,
            registry=registry,
        )
        self.between = Histogram(
            "llamaherd_time_between_tokens_seconds",
            "Between two tokens of one candidate.",
            names,
            buckets=_SECONDS,
            registry=registry,
        )
        self.queued = Histogram(
            "llamaherd_queue_seconds", "In the queue.", names, buckets=_SECONDS, registry=registry
        )
        self.tokens = Counter("llamaherd_tokens", "Tokens, by kind.", ("model", "kind"), registry=registry)
        registry.register(_Workers(loaded))

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    async def watch(self, model: str, events: AsyncIterator[Event]) -> AsyncGenerator[Event, None]:
        """The same events, measured. A request that is left early counts as cancelled."""
        began = time.monotonic()
        last: dict[int, float] = {}
        outcome = "cancelled"
        between = self.between.labels(model)
        self.open.labels(model).inc()
        generated = 0
        try:
            async for event in events:
                if isinstance(event, Token):
                    now = time.monotonic()
                    if not last:
                        self.first_token.labels(model).observe(now - began)
                    before = last.get(event.index)
                    if before is not None:
                        between.observe(now - before)
                    last[event.index] = now
                    generated += 1
                elif isinstance(event, Finished):
                    outcome = "finished"
                    self.queued.labels(model).observe(event.timings.queued)
                    self.tokens.labels(model, "prompt").inc(event.usage.prompt_tokens)
                    self.tokens.labels(model, "prompt_cached").inc(event.usage.cached_tokens)
                elif isinstance(event, Failed):
                    outcome = "failed"
                yield event
        finally:
            self.tokens.labels(model, "generated").inc(generated)
            self.requests.labels(model, outcome).inc()
            self.open.labels(model).dec()


class _Workers(Collector):
    """What the workers say of themselves."""

    def __init__(self, loaded: Callable[[], Iterable[Served]]) -> None:
        self._loaded = loaded

    def collect(self) -> Iterable[Metric]:
        """One sample a model."""
        gauges = {
            "waiting": ("llamaherd_worker_waiting", "Requests that have not started."),
            "running": ("llamaherd_worker_running", "Sequences that run."),
            "used_cells": ("llamaherd_kv_cells_used", "Cells of the KV cache in use."),
            "n_cells": ("llamaherd_kv_cells", "Cells of the KV cache."),
            "cached_sequences": ("llamaherd_prefix_cache_sequences", "Idle sequences kept for their prefix."),
            "memory": ("llamaherd_worker_memory_bytes", "Memory of the worker's own."),
        }
        totals = {
            "decoded_tokens": ("llamaherd_worker_decoded_tokens", "Tokens decoded since the worker's start."),
            "prefilled_tokens": ("llamaherd_worker_prefilled_tokens", "Prompt tokens computed."),
            "reused_tokens": (
                "llamaherd_prefix_cache_hit_tokens",
                "Prompt tokens found in the prefix cache.",
            ),
            "restored_tokens": ("llamaherd_restored_tokens", "Tokens whose KV state was read from disk."),
        }
        served = list(self._loaded())
        for field, (name, text) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=("model",))
            for s in served:
                gauge.add_metric((s.name,), float(getattr(s.supervisor.stats, field)))
            yield gauge
        for field, (name, text) in totals.items():
            counter = CounterMetricFamily(name, text, labels=("model",))
            for s in served:
                counter.add_metric((s.name,), float(getattr(s.supervisor.stats, field)))
            yield counter
        restarts = CounterMetricFamily("llamaherd_worker_restarts", "Deaths of workers.", labels=("model",))
        ready = GaugeMetricFamily("llamaherd_worker_ready", "Whether the worker answers.", labels=("model",))
        for s in served:
            restarts.add_metric((s.name,), s.supervisor.restarts)
            ready.add_metric((s.name,), float(s.supervisor.ready))
        yield restarts
        yield ready
