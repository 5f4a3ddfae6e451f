"""How another kind of scheduler drives the same stages, to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ring:
    """The steady state of a loop over micro-batch slots."""

    period_s: float  # between two micro-batches
    stage_busy: list[float]


def exchange_first_ring(
    stage_s: Sequence[float], slots: int | None = None, exchange_s: float = 0.0, rounds: int = 200
) -> Ring:
    """A loop that visits its slots in turn and *first* takes the next slot's result, *then* launches this one.

    Slot k's micro-batch is launched after the result of slot k+1, the oldest in flight, has come back; so with as many
    slots as stages (the default) one micro-batch too few is in flight, and every stage idles 1/P of the time at least.

    Args:
        stage_s: seconds of each stage for one micro-batch, all of which are equal.
        slots: micro-batches in the ring.
        exchange_s: for handing a result from the last stage to the first.
    """
    in_flight = max((slots or len(stage_s)) - 1, 1)
    free_s = [0.0] * len(stage_s)
    results_s: list[float] = []
    for k in range(in_flight * rounds):
        at_s = results_s[k - in_flight] + exchange_s if k >= in_flight else 0.0
        for stage, busy_s in enumerate(stage_s):
            at_s = free_s[stage] = max(at_s, free_s[stage]) + busy_s
        results_s.append(at_s)
    half = in_flight * (rounds // 2)
    period_s = (results_s[-1] - results_s[-1 - half]) / half
    return Ring(period_s, [busy_s / period_s for busy_s in stage_s])
