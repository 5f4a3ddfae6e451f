"""Predictions: the case that started the project, replicas, rates, memory, ranges; and coarse simulations."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from fullbore.errors import OutOfMemoryError
from fullbore.plan.coarse import EXACT, Grain, grain_for
from fullbore.plan.engines import find_engine
from fullbore.plan.hardware import parse_hardware
from fullbore.plan.layout import Layout, even_partition
from fullbore.plan.model_table import find_model
from fullbore.plan.predict import Prediction, predict, simulate_workload
from fullbore.plan.scenario import Demand, Deployment, Scenario, deploy
from fullbore.plan.workload import Job, Workload

EIGHT_PRO = "8x rtx-pro-6000"
REPORTED = Layout(pp=8, graphs=False, micro_batches=1, partition=even_partition(61, 8))


def deployed(
    name: str, hardware: str, layout: Layout, engine: str = "fullbore", concurrency: int = 8, **demand: object
) -> Deployment:
    model = find_model(name)
    assert model is not None
    scenario = Scenario(
        model=model,
        hardware=parse_hardware(hardware),
        engine=find_engine(engine),
        demand=Demand(concurrency=(concurrency,), **demand),  # type: ignore[arg-type]
    )
    return deploy(scenario, layout, concurrency)


def kimi(layout: Layout, concurrency: int, engine: str = "fullbore") -> Prediction:
    return predict(deployed("kimi-k2.6", EIGHT_PRO, layout, engine, concurrency), concurrency)


# --------------------------------------------------------------------------------------- the case that started it


def test_reported_throughput_of_one_and_eight_requests() -> None:
    one, eight = kimi(REPORTED, 1), kimi(REPORTED, 8)
    assert one.output_tok_s == pytest.approx(24.7, rel=0.02)  # fitted
    assert eight.output_tok_s == pytest.approx(95.6, rel=0.15)  # predicted
    assert one.range[0] < 24.7 < one.range[1]
    assert eight.range[0] < 95.6 < eight.range[1]
    assert one.bound_by == "few-requests, launches"
    assert eight.bound_by.startswith("packed")


def test_depth_does_nothing_for_one_request() -> None:
    for engine in ("fullbore", "sglang"):
        speeds = [kimi(replace(REPORTED, depth=depth), 1, engine).output_tok_s for depth in (0, 4)]
        assert speeds[0] == pytest.approx(speeds[1], rel=1e-3)


def test_spreading_eight_requests_doubles_them_and_graphs_help_one_most() -> None:
    packed, spread = kimi(REPORTED, 8), kimi(replace(REPORTED, micro_batches="auto"), 8)
    assert spread.output_tok_s > 1.6 * packed.output_tok_s
    assert min(spread.stage_busy) > 3 * max(packed.stage_busy)
    gains = [
        kimi(replace(REPORTED, graphs=True), each).output_tok_s / kimi(REPORTED, each).output_tok_s for each in (1, 8)
    ]
    assert gains[0] > 1.2 > gains[1] > 1


def test_utilisation_and_throughput_are_two_things() -> None:
    """Four micro-batches keep the stages a third less busy than eight, for hardly fewer tokens."""
    four, eight = (kimi(Layout(pp=8, micro_batches=number), 8) for number in (4, 8))
    busy = [sum(each.stage_busy) / 8 for each in (four, eight)]
    assert busy[0] < 0.7 * busy[1]
    assert four.output_tok_s > 0.9 * eight.output_tok_s


def test_tensor_parallelism_is_faster_for_one_request() -> None:
    ratio = kimi(Layout(tp=8), 1).output_tok_s / kimi(REPORTED, 1).output_tok_s
    assert 3.0 <= ratio <= 4.6  # "PP8 is less than a third of TP8"


def test_eight_requests_stay_in_one_slot_of_sglang_unless_the_cap_says_otherwise() -> None:
    burst = kimi(replace(REPORTED, micro_batches="auto"), 8, "sglang")
    capped = kimi(replace(REPORTED, micro_batches="auto", max_micro_batch=1), 8, "sglang")
    assert burst.micro_batch_size == pytest.approx(8, rel=0.05)
    assert capped.micro_batch_size == pytest.approx(1)
    assert capped.output_tok_s > 1.5 * burst.output_tok_s


# --------------------------------------------------------------------------------------------------- other demands


def test_more_requests_never_bring_fewer_tokens_by_much() -> None:
    deployment = deployed("qwen3-32b", "4x h100", Layout(pp=4), concurrency=64)
    speeds = [predict(deployment, number).output_tok_s for number in (1, 4, 16, 64)]
    assert all(after > 1.5 * before for before, after in pairwise(speeds))


def test_replicas_multiply_throughput_and_leave_latency() -> None:
    one = predict(deployed("llama-3.1-8b", "4x h100", Layout(), concurrency=8), 8)
    four = predict(deployed("llama-3.1-8b", "4x h100", Layout(replicas=4), concurrency=32), 32)
    assert four.output_tok_s == pytest.approx(4 * one.output_tok_s, rel=0.01)
    assert four.itl_s == pytest.approx(one.itl_s, rel=0.01)


def test_few_requests_on_many_replicas_use_as_many_replicas() -> None:
    one = predict(deployed("llama-3.1-8b", "4x h100", Layout(), concurrency=1), 1)
    four = predict(deployed("llama-3.1-8b", "4x h100", Layout(replicas=4), concurrency=2), 2)
    assert four.output_tok_s == pytest.approx(2 * one.output_tok_s, rel=0.01)


def test_an_arrival_rate_that_can_be_served_is_served() -> None:
    deployment = deployed("llama-3.1-8b", "1x h100", Layout(), rate_per_s=4.0, output_tokens=128)
    prediction = predict(deployment, 1)
    assert prediction.output_tok_s == pytest.approx(4 * 128, rel=0.2)
    assert prediction.concurrency < 16


def test_an_arrival_rate_that_cannot_be_served_is_said() -> None:
    deployment = deployed("llama-3.1-70b", "2x h100", Layout(tp=2), rate_per_s=50.0, output_tokens=256)
    assert any("more than it can serve" in note for note in predict(deployment, 1).notes)


def test_cached_prefixes_shorten_the_wait_for_the_first_token() -> None:
    without, cached = (
        predict(
            deployed("llama-3.1-8b", "1x 4090", Layout(), concurrency=4, input_tokens=8192, prefix_hit_rate=rate), 4
        )
        for rate in (0.0, 0.9)
    )
    assert cached.ttft_s < 0.4 * without.ttft_s


def test_more_requests_than_the_cache_holds_wait_and_it_is_said() -> None:
    deployment = deployed("llama-3.1-8b", "1x 4090", Layout(), concurrency=64, input_tokens=4096)
    prediction = predict(deployment, 64)
    assert "memory" in prediction.bound_by
    assert any("some of the 64 requests wait" in note for note in prediction.notes)
    assert any(note.startswith("extrapolated: efficiencies of 4090") for note in prediction.notes)


def test_what_does_not_fit_says_by_how_much() -> None:
    deployment = deployed("kimi-k2.6", "8x h100", Layout(pp=8))
    assert deployment.problem is not None
    assert "more than the 77.0 GB it may use" in deployment.problem
    with pytest.raises(OutOfMemoryError, match="does not fit as PP8"):
        predict(deployment, 1)


def test_layers_are_divided_by_speed_and_memory_of_unequal_cards() -> None:
    partition = deployed("qwen3-30b-a3b", "1x h100 + 1x l4 + 1x 4090 + 1x h100", Layout(pp=4)).partition
    assert sum(partition) == 48
    assert partition[0] > partition[2] > partition[1], "H100, then 4090, then L4"


def test_what_the_planner_predicts_is_json_of_plain_types() -> None:
    row = kimi(REPORTED, 1).to_json()
    wanted = {
        "pp",
        "tp",
        "partition",
        "concurrency",
        "output_tok_s",
        "ttft_s",
        "itl_s",
        "stage_busy",
        "bound_by",
        "range",
    }
    assert wanted <= set(row)
    assert row["range"][0] < row["output_tok_s"] < row["range"][1]
    assert len(row["stage_busy"]) == row["pp"] == 8


# ------------------------------------------------------------------------------------------------------ coarse


@pytest.mark.parametrize("grain", [Grain(1, 4), Grain(2, 1), Grain(2, 4)])
def test_coarse_simulations_agree_with_exact_ones(grain: Grain) -> None:
    deployment = deployed(
        "llama-3.1-70b", EIGHT_PRO, Layout(pp=4), concurrency=128, input_tokens=512, output_tokens=512
    )
    speeds = []
    for each in (EXACT, grain):
        number = each.jobs(128)
        jobs = [Job(each.length(512), each.length(512))] * (2 * number)
        figures = simulate_workload(deployment, Workload(jobs, number), each).whole
        speeds.append(figures.output_tokens_per_s * each.requests * each.tokens)
    assert speeds[1] == pytest.approx(speeds[0], rel=0.08)


def test_small_simulations_are_exact() -> None:
    assert grain_for(128, 1024) == EXACT
    assert grain_for(1024, 4096) == Grain(4, 4)
    assert grain_for(1023, 256) == EXACT, "requests are grouped only where they divide evenly"


def test_calibrated_parameters_narrow_the_range() -> None:
    import numpy as np

    from fullbore.plan.uncertainty import Uncertainty, prior_covariance

    deployment = deployed("llama-3.1-8b", "1x h100", Layout())
    wide, narrow = Uncertainty(deployment), Uncertainty(deployment, prior_covariance() * np.float64(0.01))
    assert narrow.throughput(8) < wide.throughput(8)
    assert narrow.first_token() < wide.first_token()
