"""The simulator, fed with what a real or simulated pipeline recorded, against that pipeline."""

from __future__ import annotations

import pytest
from plan_helpers import MS, pipeline, run

from fullbore.errors import ConfigError
from fullbore.plan.loads import Load
from fullbore.plan.measured import pipeline_of
from fullbore.plan.pipeline import Hop
from fullbore.plan.workload import closed_loop
from fullbore.telemetry.accounting import Recording


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


def test_sizes_that_did_not_occur_are_as_the_engine_expected_them() -> None:
    """Twice as slow as expected where it was seen: twice as slow elsewhere."""
    truth = pipeline([1.0, 1.0], curve="flat", stage_s=10 * MS)
    result = run(truth, closed_loop(4, 16, 20, 50), record_until_s=1e9)
    expected = [{2: 5 * MS, 8: 20 * MS}, {2: 2 * MS, 8: 8 * MS}]
    end_ns = round(result.whole.end_s * 1e9)
    costs = pipeline_of(Recording(2, 4, 0, end_ns, result.spans, result.driver_records, expected)).costs
    assert list(costs.seconds(Load(2))) == pytest.approx([10 * MS, 10 * MS])
    assert list(costs.seconds(Load(8))) == pytest.approx([40 * MS, 40 * MS])
