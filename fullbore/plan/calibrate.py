"""Calibration by a benchmark: throughput, time between tokens and to the first token, at some concurrencies.

Slopes come from the closed estimate, predictions from the simulator.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fullbore.errors import ConfigError
from fullbore.plan.fitting import Calibration, Figure, fit
from fullbore.plan.predict import predict
from fullbore.plan.scenario import Deployment
from fullbore.plan.uncertainty import Matrix, Slopes

MEASURED_SPREAD = {"output_tok_s": 0.02, "itl_s": 0.02, "ttft_s": 0.15}  # of one benchmark figure, relative
_KEYS = {"output_tok_s": ("output_tok_s", 1.0), "ttft_s": ("ttft_ms_mean", 1e-3), "itl_s": ("itl_ms_mean", 1e-3)}


@dataclass(frozen=True)
class Measured:
    """What a benchmark saw at one concurrency; None: not measured."""

    concurrency: int
    output_tok_s: float | None = None
    ttft_s: float | None = None
    itl_s: float | None = None

    def figures(self) -> list[tuple[str, float]]:
        return [(name, value) for name in _KEYS if (value := getattr(self, name)) is not None]


def read_bench(text: str) -> list[Measured]:
    """Reads bench.json: a list of objects with `concurrency` and any of output_tok_s, ttft_ms_mean, itl_ms_mean.

    Raises:
        ConfigError: not such a list, or nothing measured in it.
    """
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"--calibrate: the file is not JSON ({error}); give what `fullbore bench --json` wrote."
        ) from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError("--calibrate: the file is not a list of results; give what `fullbore bench --json` wrote.")
    measured = [_read_row(row) for row in rows]
    if not any(each.figures() for each in measured):
        raise ConfigError("--calibrate: no result has output_tok_s, ttft_ms_mean or itl_ms_mean.")
    return [each for each in measured if each.figures()]


def _read_row(row: dict[str, Any]) -> Measured:
    concurrency = row.get("concurrency")
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
        raise ConfigError(f"--calibrate: every result needs its concurrency, a positive number; got {concurrency!r}.")
    values: dict[str, float] = {}
    for name, (key, unit) in _KEYS.items():
        value = row.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ConfigError(
                f"--calibrate: {key} at concurrency {concurrency} must be a positive number, got {value!r}."
            )
        values[name] = value * unit
    return Measured(concurrency, **values)


def calibrate(
    deployment: Deployment, measured: Sequence[Measured], on_progress: Callable[[int, int], None] | None = None
) -> Calibration:
    """Fits the parameters to what was measured on this deployment."""
    asked = [(each.concurrency, name, value) for each in measured for name, value in each.figures()]
    figures = [
        Figure(f"concurrency {concurrency}, {name}", value, MEASURED_SPREAD[name]) for concurrency, name, value in asked
    ]

    def evaluate(current: Deployment) -> list[float]:
        predictions = {number: predict(_at(current, number), number) for number in {number for number, _, _ in asked}}
        return [float(getattr(predictions[number], name)) for number, name, _ in asked]

    def slopes(current: Deployment) -> Matrix:
        known = Slopes(current)
        return np.array([_slope(known, number, name) for number, name, _ in asked])

    return fit(deployment, figures, evaluate, slopes, on_progress)


def _at(deployment: Deployment, concurrency: int) -> Deployment:
    demand = replace(deployment.scenario.demand, concurrency=(concurrency,))
    return replace(deployment, scenario=replace(deployment.scenario, demand=demand))


def _slope(slopes: Slopes, concurrency: int, figure: str) -> Matrix:
    if figure == "output_tok_s":
        return slopes.throughput(concurrency)
    return slopes.token_time(concurrency) if figure == "itl_s" else slopes.first_token()
