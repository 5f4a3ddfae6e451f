"""Calibration: a measurement made with other parameters is reproduced, and predicts what was not measured."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fullbore.errors import ConfigError
from fullbore.plan.calibrate import Measured, calibrate, read_bench
from fullbore.plan.calibrate_steps import calibrate_steps, stage_times
from fullbore.plan.engines import find_engine
from fullbore.plan.fitting import calibration_text
from fullbore.plan.hardware import parse_hardware
from fullbore.plan.layout import Layout
from fullbore.plan.model_table import find_model
from fullbore.plan.parameters import CostParameters
from fullbore.plan.pipeline import Pipeline
from fullbore.plan.predict import predict
from fullbore.plan.scenario import Demand, Deployment, Scenario, deploy
from fullbore.plan.simulate import simulate
from fullbore.plan.uncertainty import prior_covariance
from fullbore.plan.workload import Job, Workload
from fullbore.scheduler.scheduler import SchedulerConfig
from fullbore.telemetry.accounting import Recording

TRUE = CostParameters(memory_factor=0.7, compute_factor=0.8, kernel_factor=1.8, host_factor=2.0)
SHARING = CostParameters(
    memory_factor=1.15, compute_factor=1.1, kernel_factor=0.6, memory_sharing=0.5, overlap_loss=0.4
)


def small_pipeline(parameters: CostParameters) -> Deployment:
    """SmolLM2 over two cores in float32, as the engine runs it without GPUs."""
    model = find_model("smollm2-135m", "fp32")
    assert model is not None
    scenario = Scenario(
        model=model,
        hardware=parse_hardware("2x cpu"),
        engine=find_engine("fullbore"),
        demand=Demand(input_tokens=64, output_tokens=64, concurrency=(32,)),
        parameters=parameters,
        cache_bytes_per_element=4.0,
    )
    return deploy(scenario, Layout(pp=2, chunk_tokens=512), 32)


@pytest.mark.parametrize("true", [TRUE, SHARING])
def test_fitted_at_1_and_8_it_predicts_2_4_16_and_32(true: CostParameters) -> None:
    truth = small_pipeline(true)
    seen = {number: predict(truth, number) for number in (1, 2, 4, 8, 16, 32)}
    measured = [
        Measured(number, seen[number].output_tok_s, seen[number].ttft_s, seen[number].itl_s) for number in (1, 8)
    ]
    found = calibrate(small_pipeline(CostParameters()), measured)
    assert all(
        each.after == pytest.approx(each.measured, rel=0.02) for each in found.residuals if "ttft_s" not in each.what
    )
    fitted = small_pipeline(found.parameters)
    for number in (2, 4, 16, 32):
        assert predict(fitted, number).output_tok_s == pytest.approx(seen[number].output_tok_s, rel=0.08)


def test_cores_share_their_memory_and_cards_do_not() -> None:
    alone, shared = (small_pipeline(CostParameters(memory_sharing=sharing)) for sharing in (0.001, 1.0))
    assert predict(shared, 1).itl_s == pytest.approx(predict(alone, 1).itl_s, rel=1e-3), "one stage works at a time"
    for number in (2, 8):
        assert predict(shared, number).output_tok_s < 0.9 * predict(alone, number).output_tok_s
    model = find_model("smollm2-135m", "bf16")
    assert model is not None
    for name, is_crowded in (("2x cpu", True), ("2x h100", False)):
        scenario = Scenario(
            model=model, hardware=parse_hardware(name), engine=find_engine("fullbore"), demand=Demand(concurrency=(8,))
        )
        assert (deploy(scenario, Layout(pp=2), 8).costs.crowded is not None) == is_crowded
        assert deploy(scenario, Layout(pp=1), 8).costs.crowded is None


def test_a_measurement_leaves_less_uncertain() -> None:
    found = calibrate(small_pipeline(CostParameters()), [Measured(1, output_tok_s=20.0)])
    assert float(np.trace(found.covariance)) < float(np.trace(prior_covariance()))
    assert "concurrency 1, output_tok_s: measured 20" in calibration_text(found)


def test_a_measurement_as_predicted_moves_nothing() -> None:
    deployment = small_pipeline(CostParameters())
    prediction = predict(deployment, 4)
    found = calibrate(deployment, [Measured(4, prediction.output_tok_s, prediction.ttft_s, prediction.itl_s)])
    assert all(factor == pytest.approx(1, abs=0.01) for factor in found.factors.values())


def recorded(parameters: CostParameters, concurrency: int) -> Recording:
    """What the simulated engine writes down, with 16 answers of each of so many clients."""
    deployment = small_pipeline(parameters)
    pipeline = Pipeline(num_stages=2, costs=deployment.costs, hops=deployment.costs.hops(), driver_s=5e-4)
    config = SchedulerConfig(num_kv_blocks=4096, pp_size=2)
    jobs = [Job(64, 64)] * 4 * concurrency
    result = simulate(pipeline, config, Workload(jobs, concurrency), record_until_s=1e9)
    end_ns = max(record.send_end_ns for record in result.spans)
    return Recording(2, config.in_flight_limit, 0, end_ns, result.spans, result.driver_records)


def test_a_recording_is_reproduced_stage_by_stage() -> None:
    times = [each for number in (2, 24) for each in stage_times(recorded(TRUE, number))]  # one size tells one thing
    assert {each.stage for each in times} == {0, 1}
    found = calibrate_steps(small_pipeline(CostParameters()), times)
    assert all(each.after == pytest.approx(each.measured, rel=0.05) for each in found.residuals)
    truth, fitted = (small_pipeline(parameters) for parameters in (TRUE, found.parameters))
    assert predict(fitted, 32).output_tok_s == pytest.approx(predict(truth, 32).output_tok_s, rel=0.15)


def test_a_recording_without_decoding_is_refused() -> None:
    with pytest.raises(ConfigError, match="no steady decoding"):
        stage_times(Recording(2, 4, 0, 1, [], []))


def test_bench_files_are_read() -> None:
    rows = [{"concurrency": 1, "output_tok_s": 24.7, "ttft_ms_mean": None, "itl_ms_mean": 40.5, "extra": "x"}]
    assert read_bench(json.dumps(rows)) == [Measured(1, 24.7, None, 0.0405)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("{}", "not a list of results"),
        ("[]", "no result has"),
        ('[{"concurrency": 1}]', "no result has"),
        ('[{"output_tok_s": 1}]', "needs its concurrency"),
        ('[{"concurrency": true, "output_tok_s": 1}]', "needs its concurrency"),
        ('[{"concurrency": 1, "output_tok_s": -1}]', "must be a positive number"),
        ('[{"concurrency": 1, "output_tok_s": NaN}]', "must be a positive number"),
    ],
)
def test_broken_bench_files_get_one_helpful_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_bench(text)
