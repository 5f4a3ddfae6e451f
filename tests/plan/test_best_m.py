"""The number of micro-batches that the scheduler chooses, against the best that exhaustive simulation finds.

Every m from 1 to the in-flight limit is forced in turn; the free scheduler, which knows what a start-up probe tells it
and learns the rest, must come within 3 % of the fastest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

import pytest
from plan_helpers import MS, endless, half_a_stage_s, pipeline, run

from fullbore.plan.curves import CurveName
from fullbore.plan.pipeline import Pipeline

STAGE_S, REFERENCE = 10 * MS, 8  # a micro-batch of 8 takes 10 ms


def equal(curve: str, num_stages: int, concurrency: int) -> Pipeline:
    return pipeline([1.0] * num_stages, curve=curve, stage_s=STAGE_S, reference=REFERENCE)


def last_twice_as_slow(curve: str, num_stages: int, concurrency: int) -> Pipeline:
    return pipeline([1.0] * (num_stages - 1) + [2.0], curve=curve, stage_s=STAGE_S, reference=REFERENCE)


def slow_driver(curve: str, num_stages: int, concurrency: int) -> Pipeline:
    delay_s = half_a_stage_s(equal(curve, num_stages, concurrency), concurrency)
    return pipeline([1.0] * num_stages, curve=curve, stage_s=STAGE_S, reference=REFERENCE, driver_s=delay_s)


SHAPES = [equal, last_twice_as_slow, slow_driver]


def tokens_per_s(pipe: Pipeline, concurrency: int, num_micro_batches: int | str) -> float:
    is_free = num_micro_batches == "auto"
    # A probe does not see every step of a curve; the free scheduler gets time to meet the sizes that it uses.
    work = endless(concurrency, output_tokens=150 if is_free else 48)
    figures = run(pipe, work, num_micro_batches=num_micro_batches, learns=is_free).steady
    return concurrency / figures.itl.mean_s


def misses(num_stages: int, curve: str, concurrencies: Iterable[int]) -> list[str]:
    found = []
    for shape in SHAPES:
        for concurrency in concurrencies:
            pipe = shape(curve, num_stages, concurrency)
            forced = {m: tokens_per_s(pipe, concurrency, m) for m in range(1, min(2 * num_stages, concurrency) + 1)}
            best = max(forced, key=lambda m: forced[m])
            ratio = tokens_per_s(pipe, concurrency, "auto") / forced[best]
            if ratio < 0.97:
                found.append(f"{shape.__name__}, C={concurrency}: {ratio:.3f} of what m={best} gives")
    return found


@pytest.mark.parametrize("curve", get_args(CurveName))
@pytest.mark.parametrize(("num_stages", "concurrencies"), [(2, (1, 2, 5, 9, 16)), (4, (3, 6, 17, 25)), (8, (19,))])
def test_within_three_percent_of_the_best(num_stages: int, concurrencies: tuple[int, ...], curve: str) -> None:
    assert misses(num_stages, curve, concurrencies) == []


@pytest.mark.slow
@pytest.mark.parametrize("curve", get_args(CurveName))
@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_within_three_percent_of_the_best_everywhere(num_stages: int, curve: str) -> None:
    most = 8 * num_stages
    concurrencies = range(1, most + 1) if num_stages < 8 else [*range(1, 17), *range(17, most + 1, 5), most]
    assert misses(num_stages, curve, concurrencies) == []


def test_more_micro_batches_can_be_slower() -> None:
    """The design's example: flat curve, last stage twice as slow, 1.78 times the tokens/s in one micro-batch."""
    pipe = last_twice_as_slow("flat", 8, 16)
    one, eight = (run(pipe, endless(16), num_micro_batches=m).steady.itl.p50_s for m in (1, 8))
    assert eight / one == pytest.approx(16 / 9)


def test_more_in_flight_does_not_help_a_lone_request() -> None:
    """C = 1: 1/(Σs + c), whatever the depth."""
    pipe = slow_driver("linear", 4, 1)
    speeds = [run(pipe, endless(1), pp_async_batch_depth=depth).steady.itl.mean_s for depth in (0, 1, 4, 8)]
    assert speeds == pytest.approx([4 * STAGE_S / REFERENCE + pipe.driver_s] * 4)
