"""Pipelines set up wrong on purpose, recorded by the simulator: the verdict, and the gain that the fix then brings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fullbore.explain.evidence import Evidence
from fullbore.explain.evidence.account import Account
from fullbore.explain.evidence.recording import of_recording
from fullbore.explain.facts import Source
from fullbore.explain.recorded_fixes import fixes_of
from fullbore.explain.run import explain
from fullbore.explain.situation import understand
from fullbore.explain.verdicts import judge
from fullbore.explain.verdicts.judge import Judgement
from fullbore.plan.loads import Load
from fullbore.plan.measure import SimulationResult
from fullbore.plan.pipeline import Hop, Pipeline
from fullbore.plan.simulate import simulate
from fullbore.plan.workload import Workload, closed_loop
from fullbore.scheduler.scheduler import SchedulerConfig
from fullbore.telemetry.accounting import Recording

STAGES = 4
LAYER_S = 0.001
OUTPUT_TOKENS = 120


@dataclass(frozen=True)
class Costs:
    """Each layer takes `LAYER_S`, and `request_s` more for each request after the first."""

    layers: Sequence[int]
    request_s: float

    def seconds(self, load: Load) -> Sequence[float]:
        requests = max(load.decodes, 1)
        return [layers * (LAYER_S + self.request_s * (requests - 1)) for layers in self.layers]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is run."""

    clients: int = 16
    layers: Sequence[int] = (8, 8, 8, 8)
    hop_s: float = 0.0
    request_s: float = 0.25 * LAYER_S  # of a layer, for each request after the first
    output_tokens: int = OUTPUT_TOKENS
    settings: dict[str, object] = field(default_factory=dict)

    @property
    def config(self) -> SchedulerConfig:
        settings = {"pp_size": len(self.layers), "num_kv_blocks": 10_000, **self.settings}
        return SchedulerConfig(**settings)  # type: ignore[arg-type]

    @property
    def expected_s(self) -> list[dict[int, float]]:
        """What the engine's scheduler has measured of each stage."""
        costs = Costs(self.layers, self.request_s)
        by_size = {size: costs.seconds(Load(decodes=size)) for size in (1, 2, 4, 8, 16)}
        return [{size: times[stage] for size, times in by_size.items()} for stage in range(len(self.layers))]


def run(setup: Setup) -> SimulationResult:
    config, stages = setup.config, len(setup.layers)
    hops = [Hop(latency_s=setup.hop_s)] * (stages - 1)
    pipeline = Pipeline(num_stages=stages, costs=Costs(setup.layers, setup.request_s), hops=hops)
    workload: Workload = closed_loop(setup.clients, 4 * setup.clients, 8, setup.output_tokens)
    return simulate(pipeline, config, workload, record_until_s=1e9)


def judged(setup: Setup) -> Judgement:
    """The verdict on the middle of a run, from its records alone."""
    result = run(setup)
    end_ns = result.whole.end_s * 1e9
    recording = Recording(
        len(setup.layers),
        setup.config.in_flight_limit,
        round(0.3 * end_ns),
        round(0.7 * end_ns),
        result.spans,
        result.driver_records,
        setup.expected_s,
    )
    evidence = Evidence()
    account = of_recording(recording, "run.fbr")
    account.layers = list(setup.layers)
    evidence.accounts.append(account)
    return judge(understand(evidence))


WRONG: dict[str, tuple[Setup, Setup, str]] = {
    "one client": (Setup(clients=1), Setup(clients=STAGES), "few-requests"),
    "all requests in one micro-batch": (Setup(settings={"num_micro_batches": 1}), Setup(), "packed-slot"),
    "layers badly split": (Setup(layers=(7, 7, 7, 11)), Setup(layers=(8, 8, 8, 8)), "imbalance"),
    "slow links": (Setup(clients=4, hop_s=0.010), Setup(clients=4), "slow-link"),
    "tiny KV cache": (Setup(settings={"num_kv_blocks": 17, "page_size": 16}), Setup(), "kv-limited"),
}


@pytest.mark.parametrize("name", WRONG)
def test_verdict_from_the_recording(name: str) -> None:
    wrong, _, expected = WRONG[name]
    judgement = judged(wrong)
    assert judgement.primary.id == expected
    assert judgement.primary.fix
    assert judgement.primary.strength >= 0.75


@pytest.mark.parametrize("name", WRONG)
def test_predicted_gain_is_the_gain_of_the_fix(name: str) -> None:
    wrong, fixed, _ = WRONG[name]
    gain = judged(wrong).primary.gain
    measured = run(fixed).steady.output_tokens_per_s / run(wrong).steady.output_tokens_per_s
    assert gain.low is not None
    assert gain.high is not None
    assert (gain.low + gain.high) / 2 == pytest.approx(measured, rel=0.15)


NOTHING_TO_FIX = {
    "well set up": Setup(),
    "as many clients as stages": Setup(clients=4),
    "as many clients as stages, short answers": Setup(clients=2, layers=(8, 8), output_tokens=8),
    # A slow last stage, and steps that cost the same for any number of requests: one micro-batch gives the most
    # tokens, and spreading them would only keep the fast stages busier.
    "one micro-batch is best": Setup(clients=4, layers=(2, 2, 2, 8), request_s=0.0),
}


@pytest.mark.parametrize("name", NOTHING_TO_FIX)
def test_idle_time_that_costs_nothing_is_no_fault(name: str) -> None:
    setup = NOTHING_TO_FIX[name]
    judgement = judged(setup)
    assert "packed-slot" not in {finding.id for finding in judgement.verdicts}
    assert "few-requests" not in {finding.id for finding in judgement.verdicts}
    if len(set(setup.layers)) == 1:
        assert judgement.primary.id == "at-roofline"
        assert "Nothing is wrong" in judgement.primary.summary


def test_a_head_stays_on_the_last_stage() -> None:
    """Layers of 1 ms on every stage, and a head of 6 ms: no split is better than 10 ms, none moves the head."""
    account = Account(Source("run.fbr"), 1.0, [{}] * 4, stage_s=[8e-3, 8e-3, 8e-3, 14e-3], layers=[8, 8, 8, 8])
    *others, last = fixes_of(account).balanced
    assert sum(others) + last == 32
    assert max(*others, last + 6) == 10


def test_no_requests_are_no_evidence() -> None:
    evidence = Evidence()
    evidence.accounts.append(of_recording(Recording(2, 4, 0, 10**9, [], []), "run.fbr"))
    assert judge(understand(evidence)).primary.id == "insufficient-evidence"


def test_a_recording_file_is_evidence(tmp_path: Path) -> None:
    recording_file = pytest.importorskip("fullbore.telemetry.recording")
    result = run(Setup(clients=1))
    recording = Recording(STAGES, 8, 0, round(result.whole.end_s * 1e9), result.spans, result.driver_records)
    stages = [recording_file.StageDescription((8 * n, 8 * n + 8), "cpu") for n in range(STAGES)]
    recording_file.write_timeline(tmp_path / "run.fbr", recording_file.Timeline(recording=recording, stages=stages))
    explanation = explain([tmp_path])
    assert explanation.answer["recognised"][0]["kind"] == "fullbore recording"
    assert explanation.answer["primary"] == "few-requests"


def damaged(data: bytes) -> list[bytes]:
    return [data[: len(data) // 2], data[:12], data[:40] + bytes(60) + data[100:], data[:8] + b"\xff\xff" + data[10:]]


def test_a_damaged_recording_is_said_to_be(tmp_path: Path) -> None:
    recording_file = pytest.importorskip("fullbore.telemetry.recording")
    result = run(Setup(clients=1))
    recording = Recording(STAGES, 8, 0, round(result.whole.end_s * 1e9), result.spans, result.driver_records)
    path = tmp_path / "run.fbr"
    recording_file.write_timeline(path, recording_file.Timeline(recording=recording))
    for data in damaged(path.read_bytes()):
        path.write_bytes(data)
        explanation = explain([tmp_path])
        assert explanation.exit_code == 4
        assert not explanation.answer["recognised"][0]["used"]
