"""The simulator, fed with what a real or simulated pipeline recorded, against that pipeline."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from plan_helpers import MS, pipeline, run

from fullbore.config import EngineConfig
from fullbore.engine.client import EngineClient
from fullbore.errors import ConfigError
from fullbore.plan.loads import Load
from fullbore.plan.measured import pipeline_of
from fullbore.plan.pipeline import Hop
from fullbore.plan.workload import closed_loop
from fullbore.telemetry.accounting import Recording

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "prediction.py"


def test_a_recorded_simulation_gives_its_own_pipeline_back() -> None:
    truth = pipeline(
        [1.0, 1.4, 0.7],
        curve="affine",
        stage_s=10 * MS,
        reference=4,
        prefill_token_s=0.05 * MS,
        driver_s=3 * MS,
        hop=Hop(2 * MS),
    )
    work = closed_loop(9, 54, [20, 300], [30, 50, 20])
    result = run(truth, work, record_until_s=1e9)
    end_ns = round(result.whole.end_s * 1e9)
    measured = pipeline_of(Recording(3, 6, 0, end_ns, result.spans, result.driver_records))
    assert measured.costs.seconds(Load(3)) == pytest.approx(truth.costs.seconds(Load(3)), rel=0.001)
    assert measured.costs.seconds(Load(3, 200)) == pytest.approx(truth.costs.seconds(Load(3, 200)), rel=0.05)
    assert measured.driver_s == pytest.approx(3 * MS, rel=0.01)
    assert [hop.latency_s for hop in measured.hops] == pytest.approx([2 * MS] * 2, rel=0.01)
    again = run(measured, work)
    assert again.steady.output_tokens_per_s == pytest.approx(result.steady.output_tokens_per_s, rel=0.02)


def test_a_recording_without_decodes_is_refused() -> None:
    with pytest.raises(ConfigError, match="record while requests are answered"):
        pipeline_of(Recording(2, 4, 0, 1, [], []))


@pytest.mark.slow
@pytest.mark.parametrize(("pp_size", "concurrency"), [(4, 16), (8, 16)])
def test_engine_with_sleeping_stages_does_what_the_simulator_predicts(pp_size: int, concurrency: int) -> None:
    """Real processes, messages and scheduling; only the stages' work is made up, and long enough to be kept to.

    Up to three runs, since the test may share its machine; each is compared with the stage times of its own.
    """
    spec = importlib.util.spec_from_file_location("prediction", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    prediction = importlib.util.module_from_spec(spec)
    sys.modules["prediction"] = prediction
    spec.loader.exec_module(prediction)
    model = f"sleep://layers={pp_size},layer_ms=20,token_ms=0.5"
    with EngineClient.start(EngineConfig(model=model, pp_size=pp_size, max_total_tokens=16_384)) as client:
        rounds = (prediction.compare(client, concurrency, prompt=32, output=24) for _ in range(3))
        assert any(abs(comparison.error) <= 0.1 for comparison in rounds)
