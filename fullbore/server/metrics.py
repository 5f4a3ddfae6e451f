"""Prometheus metrics: what the engine counts, and what clients experience."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fullbore.engine.messages import EngineStats

LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)

# Prometheus name, field of EngineStats, help text.
GAUGES = [
    ("fullbore_requests_running", "running", "Requests prefilling or decoding."),
    ("fullbore_requests_waiting", "waiting", "Requests not started yet."),
    ("fullbore_micro_batches_in_flight", "in_flight", "Micro-batches launched whose result has not come back."),
    ("fullbore_kv_blocks_used", "used_blocks", "KV cache blocks in use, the same on every stage."),
    ("fullbore_kv_blocks_free", "free_blocks", "KV cache blocks that can be allocated."),
]
COUNTERS = [
    ("fullbore_preemptions", "preemptions", "Requests set back for lack of KV blocks."),
    ("fullbore_micro_batches", "micro_batches", "Micro-batches launched."),
    ("fullbore_prompt_tokens", "prompt_tokens", "Prompt tokens of the requests started."),
    ("fullbore_cached_prompt_tokens", "cached_tokens", "Prompt tokens found in the prefix cache."),
    ("fullbore_generated_tokens", "generated_tokens", "Tokens generated."),
]


@dataclass
class RequestTiming:
    """When the tokens of one request arrived."""

    metrics: Metrics
    arrival_s: float
    last_token_s: float | None = None
    finish_reason: str = "error"

    def on_token(self, now_s: float) -> None:
        if self.last_token_s is None:
            self.metrics.time_to_first_token.observe(now_s - self.arrival_s)
        else:
            self.metrics.inter_token_latency.observe(now_s - self.last_token_s)
        self.last_token_s = now_s


class Metrics:
    """The server's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector()
        self._registry.register(self._engine)
        self.time_to_first_token = self._histogram("time_to_first_token", "From the request to its first token.")
        self.inter_token_latency = self._histogram("inter_token_latency", "Between two tokens of a request.")
        self.request_duration = self._histogram("request_duration", "From the request to its end.")
        self.requests = Counter(
            "fullbore_requests",
            "Requests ended, by how: stop, length, cancelled (the client went away) or error.",
            ["finish_reason"],
            registry=self._registry,
        )

    def render(self, stats: EngineStats | None) -> bytes:
        """The metrics in Prometheus' text format; without those of the engine when `stats` is None."""
        self._engine.stats = stats
        return generate_latest(self._registry)

    @contextmanager
    def request(self) -> Iterator[RequestTiming]:
        """Counts and times one request, whichever way it ends."""
        timing = RequestTiming(self, time.perf_counter())
        try:
            yield timing
        except Exception:
            timing.finish_reason = "error"
            raise
        except BaseException:  # the task was cancelled, or the generator closed
            timing.finish_reason = "cancelled"
            raise
        finally:
            self.requests.labels(timing.finish_reason).inc()
            self.request_duration.observe(time.perf_counter() - timing.arrival_s)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"fullbore_{name}_seconds", text, buckets=LATENCY_BUCKETS_S, registry=self._registry)


class _EngineCollector(Collector):
    """Shows the engine's own counters as they were when asked last."""

    stats: EngineStats | None = None

    def collect(self) -> Iterable[Metric]:
        if self.stats is None:
            return
        for name, field, text in GAUGES:
            yield GaugeMetricFamily(name, text, value=getattr(self.stats, field))
        for name, field, text in COUNTERS:
            yield CounterMetricFamily(name, text, value=getattr(self.stats, field))
        busy = CounterMetricFamily("fullbore_stage_busy_seconds", "Time that a stage has computed.", labels=["stage"])
        for stage, busy_s in enumerate(self.stats.stage_busy_s):
            busy.add_metric([str(stage)], busy_s)
        yield busy
