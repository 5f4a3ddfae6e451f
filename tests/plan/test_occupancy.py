"""How busy the stages are, on loads for which the most that is possible is known."""

from __future__ import annotations

import pytest
from plan_helpers import MS, endless, half_a_stage_s, pipeline, run

from fullbore.plan.pipeline import Pipeline
from fullbore.plan.workload import closed_loop


def linear(num_stages: int, concurrency: int) -> Pipeline:
    """Driver latency: half a stage."""
    stages = pipeline([1.0] * num_stages, curve="linear", stage_s=10 * MS, reference=8)
    delay_s = half_a_stage_s(stages, concurrency)
    return pipeline([1.0] * num_stages, curve="linear", stage_s=10 * MS, reference=8, driver_s=delay_s)


@pytest.mark.parametrize(
    ("num_stages", "concurrency"),
    [(2, 4), (2, 6), (2, 16), (4, 8), (4, 15), (4, 32), (8, 16), (8, 27), (8, 64), (16, 32), (16, 128), (64, 128)],
)
def test_every_stage_is_busy(num_stages: int, concurrency: int) -> None:
    figures = run(linear(num_stages, concurrency), endless(concurrency, 40)).steady
    assert min(figures.stage_busy) >= 0.98
    assert max(figures.stage_busy) <= 1 + 1e-9


@pytest.mark.parametrize(("num_stages", "concurrency"), [(2, 1), (4, 1), (4, 3), (8, 5), (16, 7), (64, 20)])
def test_fewer_requests_than_stages_keep_their_share_busy(num_stages: int, concurrency: int) -> None:
    figures = run(pipeline([1.0] * num_stages), endless(concurrency, 101)).steady
    assert figures.stage_busy == pytest.approx([concurrency / num_stages] * num_stages, rel=0.01)
    assert figures.micro_batches_in_flight_mean == pytest.approx(concurrency, rel=0.01)


@pytest.mark.parametrize(("curve", "least"), [("linear", 0.95), ("affine", 0.93), ("flat", 0.89)])
def test_requests_that_come_and_go_keep_stages_busy(curve: str, least: float) -> None:
    """Unequal prompts and outputs: prompt chunks must not make the micro-batches so uneven that stages idle."""
    pipe = pipeline([1.0] * 4, curve=curve, stage_s=10 * MS, reference=8, prefill_token_s=0.04 * MS)
    work = closed_loop(32, 192, [16, 500, 64, 1500, 200, 64, 800], [8, 128, 30, 64, 300, 20])
    assert min(run(pipe, work).steady.stage_busy) >= least


def test_nothing_learned_and_no_probe_still_fills_the_pipe() -> None:
    pipe = pipeline([1.0] * 4, curve="affine", stage_s=10 * MS, reference=8, prefill_token_s=0.04 * MS)
    figures = run(pipe, closed_loop(16, 96, 64, 64), is_probed=False, learns=False).steady
    assert min(figures.stage_busy) >= 0.95


@pytest.mark.parametrize("is_probed", [True, False])
def test_learning_from_saturated_stages_does_not_inflate_the_number_in_flight(is_probed: bool) -> None:
    """Waiting in the queue of a busy stage looks like a long way to it; taken for one, it would ask for more depth."""
    pipe = pipeline([1.0, 1.0, 2.0, 1.0], curve="affine", stage_s=10 * MS, reference=8, driver_s=2 * MS)
    figures = run(pipe, endless(32, 200), is_probed=is_probed).steady
    assert figures.micro_batches_in_flight_mean <= 5
