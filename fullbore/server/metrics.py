"""Prometheus metrics: what the engine counts, and what clients experience."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from fullbore.engine.messages import EngineStats
from fullbore.engine.records import STEP_BUCKETS_S
from fullbore.server.stage_time import StageTime

MICRO_BATCH_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
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
    last_token_s: dict[int, float] = field(default_factory=dict)  # choice -> when its latest came
    finish_reason: str = "error"

    def on_token(self, now_s: float, choice: int) -> None:
        last_s = self.last_token_s.get(choice)
        if last_s is None:
            self.metrics.time_to_first_token.observe(now_s - self.arrival_s)
        else:
            self.metrics.inter_token_latency.observe(now_s - last_s)
        self.last_token_s[choice] = now_s


class Metrics:
    """The server's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.stage_time = StageTime()
        self._engine = _EngineCollector(self.stage_time)
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

    def __init__(self, stage_time: StageTime) -> None:
        self.stats: EngineStats | None = None
        self._stage_time = stage_time

    def collect(self) -> Iterable[Metric]:
        stats = self.stats
        if stats is None:
            return
        for name, counted, text in GAUGES:
            yield GaugeMetricFamily(name, text, value=getattr(stats, counted))
        for name, counted, text in COUNTERS:
            yield CounterMetricFamily(name, text, value=getattr(stats, counted))
        yield _micro_batch_sizes(stats)
        yield from _stage_steps(stats)
        yield from self._stage_times()

    def _stage_times(self) -> Iterable[Metric]:
        idle = CounterMetricFamily(
            "fullbore_stage_idle_seconds",
            "Time that a stage has waited, by cause (docs/accounting.md).",
            labels=["stage", "cause"],
        )
        busy = GaugeMetricFamily(
            "fullbore_stage_busy_ratio",
            "Part of the time since these metrics were asked for last in which a stage worked.",
            labels=["stage"],
        )
        for stage, idle_ns in enumerate(self._stage_time.idle_ns):
            for cause, ns in idle_ns.items():
                idle.add_metric([str(stage), cause], ns * 1e-9)
        for stage, ratio in enumerate(self._stage_time.busy_ratio):
            busy.add_metric([str(stage)], ratio)
        yield idle
        yield busy


def _micro_batch_sizes(stats: EngineStats) -> Metric:
    sizes = stats.requests_in_micro_batch
    counts = [sum(count for size, count in sizes.items() if size <= bound) for bound in MICRO_BATCH_BUCKETS]
    buckets = [(str(bound), count) for bound, count in zip(MICRO_BATCH_BUCKETS, counts, strict=True)]
    return HistogramMetricFamily(
        "fullbore_micro_batch_requests",
        "Requests in a micro-batch, at its launch.",
        buckets=[*buckets, ("+Inf", sum(sizes.values()))],
        sum_value=sum(size * count for size, count in sizes.items()),
    )


def _stage_steps(stats: EngineStats) -> Iterable[Metric]:
    busy = CounterMetricFamily("fullbore_stage_busy_seconds", "Time that a stage has computed.", labels=["stage"])
    steps = HistogramMetricFamily(
        "fullbore_stage_step_seconds", "Time that a stage computes one micro-batch.", labels=["stage"]
    )
    modes = CounterMetricFamily(
        "fullbore_stage_steps",
        "Micro-batches that a stage has computed, by how: from a CUDA graph or eagerly.",
        labels=["stage", "mode"],
    )
    bounds = [*map(str, STEP_BUCKETS_S), "+Inf"]
    for stage, (busy_s, counts) in enumerate(zip(stats.stage_busy_s, stats.steps_in_bucket, strict=True)):
        busy.add_metric([str(stage)], busy_s)
        steps.add_metric([str(stage)], list(zip(bounds, accumulate(counts), strict=True)), busy_s)
        modes.add_metric([str(stage), "graph"], stats.graph_steps[stage])
        modes.add_metric([str(stage), "eager"], sum(counts) - stats.graph_steps[stage])
    yield busy
    yield steps
    yield modes
