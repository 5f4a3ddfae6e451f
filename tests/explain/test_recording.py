"""Pipelines set up wrong on purpose, recorded by the simulator: the verdict, and the gain that the fix then brings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fullbore.explain.evidence import Evidence
from fullbore.explain.evidence.recording import of_recording
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
    """Each layer takes `LAYER_S`, and a request more adds a quarter of that."""

    layers: Sequence[int]

    def seconds(self, load: Load) -> Sequence[float]:
        requests = max(load.decodes, 1)
        return [layers * LAYER_S * (0.75 + 0.25 * requests) for layers in self.layers]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is run."""

    clients: int = 16
    layers: Sequence[int] = (8, 8, 8, 8)
    hop_s: float = 0.0
    settings: dict[str, object] = field(default_factory=dict)


def run(setup: Setup) -> SimulationResult:
    config = SchedulerConfig(**{"pp_size": STAGES, "num_kv_blocks": 10_000, **setup.settings})  # type: ignore[arg-type]
    hops = [Hop(latency_s=setup.hop_s)] * (STAGES - 1)
    pipeline = Pipeline(num_stages=STAGES, costs=Costs(setup.layers), hops=hops)
    workload: Workload = closed_loop(setup.clients, 4 * setup.clients, 8, OUTPUT_TOKENS)
    return simulate(pipeline, config, workload, is_probed=False, learns=False, record_until_s=1e9)


def judged(setup: Setup) -> Judgement:
    """The verdict on the middle of a run, from its records alone."""
    result = run(setup)
    config = SchedulerConfig(**{"pp_size": STAGES, "num_kv_blocks": 10_000, **setup.settings})  # type: ignore[arg-type]
    end_ns = result.whole.end_s * 1e9
    recording = Recording(
        STAGES, config.in_flight_limit, round(0.3 * end_ns), round(0.7 * end_ns), result.spans, result.driver_records
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


@pytest.mark.parametrize("name", ["one client", "layers badly split", "slow links"])
def test_predicted_gain_is_the_gain_of_the_fix(name: str) -> None:
    wrong, fixed, _ = WRONG[name]
    gain = judged(wrong).primary.gain
    measured = run(fixed).steady.output_tokens_per_s / run(wrong).steady.output_tokens_per_s
    assert gain.high is not None
    assert gain.high == pytest.approx(measured, rel=0.2)


def test_a_well_set_up_pipeline_is_not_accused() -> None:
    judgement = judged(Setup())
    assert judgement.primary.id in ("at-roofline", "insufficient-evidence")


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
