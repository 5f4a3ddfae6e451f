# ruff: noqa: N803 (argument names are those of the data file)
"""The simulator, with the real scheduler in it, against formulas that can be worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plan_helpers import MS, busy_over_cycles, endless, pipeline, run

from fullbore.plan.comparison import exchange_first_ring
from fullbore.plan.loads import Load
from fullbore.plan.models import distinct_experts
from fullbore.plan.pipeline import Hop, Journey, Pipeline, Stages
from fullbore.plan.workload import closed_loop
from fullbore.scheduler.micro_batch import MicroBatch
from fullbore.scheduler.scheduler import SchedulerConfig

CASES = json.loads((Path(__file__).parents[1] / "data" / "closed_form_scheduling.json").read_text())["cases"]
CHUNK = 32


def chunks_through(factors: list[float], chunks: int) -> Any:
    """One prompt of so many equal chunks, each of which takes a second on a stage with factor 1."""
    pipe = pipeline(factors, curve="linear", prefill_token_s=1 / CHUNK)
    return run(pipe, closed_loop(1, 1, chunks * CHUNK, 1), chunked_prefill_size=CHUNK).whole


def makespan_s(durations_s: list[float], num_stages: int, hop: Hop | None = None, tokens: int = 1) -> float:
    """Micro-batches of the given durations, all launched at once, through stages alone: no scheduler."""
    stages = Stages(pipeline([1.0] * num_stages, hop=hop))
    journey = None
    for number, seconds in enumerate(durations_s):
        journey = Journey(MicroBatch(number, [], "request-arrived", 0.0), 0.0, 0)
        stages.run(journey, [seconds] * num_stages, tokens, wants_records=False)
    assert journey is not None
    return journey.ends_s[-1]


def decode(factors: list[float], micro_batches: int, concurrency: int | None = None, curve: str = "flat") -> Any:
    """Endless decoding in a given number of micro-batches; seconds of a stage are its factor."""
    pipe = pipeline(factors, curve=curve, reference=1)
    work = endless(concurrency or micro_batches, output_tokens=100)
    depth = max(micro_batches - len(factors), 0)
    return run(pipe, work, num_micro_batches=micro_batches, pp_async_batch_depth=depth, record_until_s=1e9)


def mean_busy_when_full(stage_s: list[float]) -> float:
    num_stages = len(stage_s)
    result = decode(stage_s, 2 * num_stages)
    return sum(busy_over_cycles(result, i, 20 * num_stages) for i in range(num_stages)) / num_stages


def burst(m: int, P: int) -> float:
    busy = chunks_through([1.0] * P, m).stage_busy
    assert busy == pytest.approx([busy[0]] * P)
    return float(busy[0])


def steady(m: int, P: int) -> float:
    result = decode([1.0] * P, m)
    return min(busy_over_cycles(result, stage, 20 * m) for stage in range(P))


def head_balance_measured(layer_us: float, head_us: float, L: int, P: int) -> float:
    return mean_busy_when_full([L / P * layer_us] * (P - 1) + [L / P * layer_us + head_us])


def split_gain(curve: str) -> Callable[..., float]:
    def gain(P: int, B: int, t: float) -> float:
        figures = [decode([t] * P, m, B, curve).steady for m in (1, 2)]
        return figures[0].itl.p50_s / figures[1].itl.p50_s

    return gain


def requests_per_micro_batch(max_num_seqs: int, pp: int) -> float:
    pipe = pipeline([1.0] * pp, curve="affine")
    sizes = run(pipe, endless(3 * max_num_seqs), max_running_requests=max_num_seqs).steady.sizes
    return max(sizes, key=lambda size: sizes[size])


def busy_percent_of_each(n: int) -> float:
    result = decode([1.0] * n, 1)
    shares = [100 * busy_over_cycles(result, stage, 20) for stage in range(n)]
    assert shares == [shares[0]] * n
    return shares[0]


def share_of_first(g: list[float], bw: list[float]) -> float:
    return busy_over_cycles(decode([size / speed for size, speed in zip(g, bw, strict=True)], 1), 0, 20)


def slowest_gates(s: list[float], m: int, c: float) -> float:
    assert c == 0
    return float(decode(s, m).steady.itl.mean_s)


MEASURES: dict[str, Callable[..., float]] = {
    "fill-m": burst,
    "steady-m": steady,
    "flowshop-proportionate": lambda t, P: makespan_s(t, P),
    "flowshop-growing-chunks": lambda t, P: sum(t) / makespan_s(t, P),
    "flowshop-one-slow-stage": lambda s, m: chunks_through(s, m).end_s,
    "steady-period": slowest_gates,
    "ring-depth0-cap": lambda P: exchange_first_ring([1.0] * P).stage_busy[0],
    "ring-depth0-": lambda sum_stage_ms, P: exchange_first_ring([sum_stage_ms / P] * P).period_s,
    "sglang-loop-size": lambda **settings: SchedulerConfig(num_kv_blocks=1, **settings).in_flight_limit,
    "cap-vllm-8seqs": requests_per_micro_batch,
    "partition-": lambda n: mean_busy_when_full(n),
    "head-balance-measured": head_balance_measured,
    "head-balance": lambda s: mean_busy_when_full(s),
    "head-speedup": lambda s: decode(s, 1).steady.itl.mean_s / decode(s, 8).steady.itl.mean_s * 8,
    "pp-prefill-2048": lambda h, b, n, hops, gbps: (
        makespan_s([0.0], hops + 1, Hop(0.0, h * b / (gbps * 1e9 / 8)), n) / MS
    ),
    "hop-kimi-8k-pcie5": lambda h, b, n, bw: makespan_s([0.0], 2, Hop(0.0, h * b / bw), n) / MS,
    "aic-p2p": lambda P, b, h, bw: makespan_s([0.0], P, Hop(10e-6, h * 2 / bw), b) / MS,
    "U-split-penalty": lambda E, k, b: distinct_experts(b, E, k) / (b * distinct_experts(1, E, k)),
    "U-": lambda E, k, b: distinct_experts(b, E, k),
    "split-no-gain": split_gain("flat"),
    "split-gain-compute-bound": split_gain("linear"),
    "series-exo": lambda r, f: (
        1 / decode([share / speed for share, speed in zip(f, r, strict=True)], 1).steady.itl.mean_s
    ),
    "proportional-split-bw": share_of_first,
    "util-one-stream": busy_percent_of_each,
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_closed_form(case: dict[str, Any]) -> None:
    measure = next(measure for prefix, measure in MEASURES.items() if case["id"].startswith(prefix))
    tolerance = {case["tol_kind"]: max(case["tol"], 1e-9)}
    assert measure(**case["inputs"]) == pytest.approx(case["expected"], **tolerance)


@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_exchange_first_ring_is_one_micro_batch_short(num_stages: int) -> None:
    """It does what our scheduler does when told to use one micro-batch fewer than there are stages."""
    ring = exchange_first_ring([1.0] * num_stages)
    ours = decode([1.0] * num_stages, num_stages - 1)
    assert ours.steady.itl.mean_s / (num_stages - 1) == pytest.approx(ring.period_s)
    assert exchange_first_ring([1.0] * num_stages, slots=num_stages + 1).stage_busy == pytest.approx([1.0] * num_stages)


def test_a_link_is_a_resource_and_latency_is_a_delay() -> None:
    slow_link = Hop(latency_s=5.0, token_s=2.0)
    assert makespan_s([1.0], 2, slow_link) == pytest.approx(1 + 2 + 5 + 1)
    assert makespan_s([1.0] * 10, 2, slow_link) == pytest.approx(1 + 10 * 2 + 5 + 1), "the link gates, not its latency"


def test_ring_of_unequal_micro_batches_is_gated_by_the_dearest() -> None:
    """P unequal micro-batches in flight keep a stage busy Σt/(P·max t) at most: what depth is for."""

    class Ring:
        def seconds(self, load: Load) -> list[float]:
            return [float(load.prefill_tokens)] * 4

    durations = [40.0, 10.0, 10.0, 10.0]
    assert makespan_s(durations * 25, 4) == pytest.approx(sum(durations) * 25 + 3 * 40), "launched at once: no ring"
    stages = Stages(Pipeline(num_stages=4, costs=Ring()))
    results_s: list[float] = []
    for k in range(400):
        launched_s = results_s[k - 4] if k >= 4 else 0.0
        journey = Journey(MicroBatch(k, [], "slot-freed", 0.0), launched_s, 0)
        stages.run(journey, [durations[k % 4]] * 4, 1, wants_records=False)
        results_s.append(journey.ends_s[-1])
    busy = 400 / 4 * sum(durations) / results_s[-1]
    assert busy == pytest.approx(sum(durations) / (4 * 40), rel=0.03)
