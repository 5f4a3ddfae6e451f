"""Experiments in the bench results: rows that differ in one setting show directly what that setting costs."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from fullbore.explain.evidence.bench import BenchRow
from fullbore.explain.facts import Fact, show
from fullbore.explain.situation import Situation
from fullbore.explain.verdicts.finding import Finding, Gain

_HELPS = 1.12
_NO_EFFECT = 1.04
_MOST_ROWS = 256  # compared with each other

# Name of the setting -> the verdict that a better value of it speaks for.
_SETTINGS: list[tuple[str, str]] = [
    (r"graph|eager|max_copies|sched_copies", "launch-bound"),  # llama.cpp#13751: pipeline copies cost it its graphs
    (r"micro_?batch(?!.*depth)", "packed-slot"),
    (r"depth", "ring-order"),
    (r"partition|layers_per_stage|layer_split|tensor_split", "imbalance"),
    (r"link|network|nic|ethernet|infiniband|nvlink|p2p|interconnect|pcie|rdma|ib_", "slow-link"),
    (r"clock|power_limit|sm_mhz", "clock-throttle"),
    (r"gpu_memory_util|mem_fraction|kv_(?:tokens|gb|cache_(?!dtype))", "kv-limited"),
    (r"async_scheduling|broadcast", "control-plane-latency"),
]


class Experiment(NamedTuple):
    """`ratio`: better over worse, in `metric`."""

    verdict: str
    setting: str
    better: Any
    worse: Any
    ratio: float
    metric: str
    facts: list[Fact]


def run_experiments(rows: list[BenchRow]) -> list[Experiment]:
    """All pairs of rows that differ in one known setting alone; of each setting the pair with the largest effect."""
    best: dict[str, Experiment] = {}
    rows = rows[:_MOST_ROWS]
    for n, first in enumerate(rows):
        for second in rows[n + 1 :]:
            found = _compare(first, second)
            if found is not None and (found.setting not in best or found.ratio > best[found.setting].ratio):
                best[found.setting] = found
    return list(best.values())


def _compare(first: BenchRow, second: BenchRow) -> Experiment | None:
    names = set(first.varied) | set(second.varied)
    differing = [name for name in names if first.varied.get(name) != second.varied.get(name)]
    if len(differing) != 1 or first.concurrency != second.concurrency:
        return None
    name = differing[0]
    verdict = next((verdict for pattern, verdict in _SETTINGS if re.search(pattern, name, re.I)), None)
    if verdict is None or (first.pp, first.tp, first.gpus) != (second.pp, second.tp, second.gpus):
        return None
    for metric, is_time in (
        ("output_tok_s", False),
        ("input_tok_s", False),
        ("itl_ms", True),
        ("ttft_ms", True),
        ("latency_ms", True),
    ):
        a, b = getattr(first, metric), getattr(second, metric)
        if not a or not b:
            continue
        is_first_better = (a < b) if is_time else (a > b)
        better, worse = (first, second) if is_first_better else (second, first)
        facts = [
            Fact(f"{name} = {row.varied.get(name)}: {metric} {show(getattr(row, metric))}", None, row.source)
            for row in (worse, better)
        ]
        return Experiment(
            verdict, name, better.varied.get(name), worse.varied.get(name), max(a, b) / min(a, b), metric, facts
        )
    return None


def from_experiments(s: Situation) -> list[Finding]:
    """A setting that demonstrably helps is a cause that is demonstrably there."""
    findings = []
    for experiment in run_experiments(s.evidence.bench):
        if experiment.ratio < _HELPS:
            continue
        findings.append(
            Finding(
                experiment.verdict,
                0.85,
                f"{experiment.setting} = {experiment.better} is {show(experiment.ratio)} × as good as "
                f"{experiment.worse}, everything else equal.",
                evidence=list(experiment.facts),
                fix=[f"{experiment.setting} = {experiment.better}"],
                gain=Gain(
                    f"{show(experiment.ratio)} × in {experiment.metric}, measured",
                    experiment.ratio,
                    experiment.ratio,
                    experiment.metric,
                ),
                verify="the same bench again with it",
            )
        )
    return findings


def refuted(s: Situation) -> list[tuple[str, Fact]]:
    """Settings that demonstrably change nothing: their verdicts are not the bottleneck."""
    return [
        (
            e.verdict,
            Fact(f"{e.setting} {e.worse} or {e.better}: no difference ({show(e.ratio)} ×)", e.ratio, e.facts[0].source),
        )
        for e in run_experiments(s.evidence.bench)
        if e.ratio < _NO_EFFECT
    ]
