"""Fits the cost model's parameters to a measurement, and says what is left over.

The parameters' logarithms get the values that are likeliest given the measured figures and the parameters' spreads: a
measurement moves what it tells something about, and leaves the rest. Slopes come from the closed estimate, residuals
from the simulator (Gauss-Newton).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any

import numpy as np

from fullbore.errors import ConfigError
from fullbore.plan.devices import MEASURED_DEVICES
from fullbore.plan.parameters import CostParameters, scaled
from fullbore.plan.predict import Prediction, predict
from fullbore.plan.scenario import Deployment
from fullbore.plan.uncertainty import NAMES, Matrix, Slopes, prior_covariance

STEPS = 5
MEASURED_SPREAD = {"output_tok_s": 0.02, "itl_s": 0.02, "ttft_s": 0.15}  # of one benchmark figure, relative
# How many spreads a parameter may move as easily as a figure may be off by its own one: the device's efficiencies were
# measured, or taken from another device.
FREEDOM, FREEDOM_UNMEASURED = 3.0, 10.0
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


@dataclass(frozen=True)
class Residual:
    """One measured figure, and the prediction of it before and after the fit."""

    concurrency: int
    figure: str
    measured: float
    before: float
    after: float


@dataclass(frozen=True)
class Calibration:
    """The fitted parameters, how certain they are now, and what they do not explain."""

    parameters: CostParameters
    factors: dict[str, float]  # by which each parameter moved
    covariance: Matrix
    residuals: list[Residual]


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
    start = deployment.scenario.parameters
    moved = np.zeros(len(NAMES))  # logarithms of the factors
    devices = {device.name for stage in deployment.stages for device in stage.devices}
    freedom = FREEDOM if devices <= set(MEASURED_DEVICES) else FREEDOM_UNMEASURED
    prior = np.linalg.inv(prior_covariance() * freedom**2)
    figures = [(each, name, value) for each in measured for name, value in each.figures()]
    weights = np.diag([MEASURED_SPREAD[name] ** -2 for _, name, _ in figures])
    first: list[float] = []
    jacobian = np.zeros((len(figures), len(NAMES)))
    for step in range(STEPS):
        current = deployment.with_parameters(_moved(start, moved))
        predicted = _predict(current, figures)
        first = first or predicted
        if on_progress:
            on_progress(step, STEPS + 1)
        slopes = Slopes(current)
        jacobian = np.array([_slope(slopes, each.concurrency, name) for each, name, _ in figures])
        errors = np.array([log(value / now) for (_, _, value), now in zip(figures, predicted, strict=True)])
        normal = jacobian.T @ weights @ jacobian + prior
        change = np.linalg.solve(normal, jacobian.T @ weights @ errors - prior @ moved)
        moved = moved + np.clip(change, -1.0, 1.0)  # the slopes hold near the point only
        if float(np.abs(change).max()) < 1e-3:
            break
    last = _predict(deployment.with_parameters(_moved(start, moved)), figures)
    if on_progress:
        on_progress(STEPS + 1, STEPS + 1)
    residuals = [
        Residual(each.concurrency, name, value, before, after)
        for (each, name, value), before, after in zip(figures, first, last, strict=True)
    ]
    # What remains uncertain: the spreads, less what the measurement tells.
    remaining = np.linalg.inv(jacobian.T @ weights @ jacobian + np.linalg.inv(prior_covariance()))
    factors = {name: exp(float(each)) for name, each in zip(NAMES, moved, strict=True)}
    return Calibration(_moved(start, moved), factors, remaining, residuals)


def _moved(start: CostParameters, moved: Matrix) -> CostParameters:
    parameters = start
    for name, each in zip(NAMES, moved, strict=True):
        parameters = scaled(parameters, name, exp(float(each)))
    return parameters


def _predict(deployment: Deployment, figures: Sequence[tuple[Measured, str, float]]) -> list[float]:
    predictions: dict[int, Prediction] = {}
    for each, _, _ in figures:
        if each.concurrency not in predictions:
            scenario = deployment.scenario
            demand = replace(scenario.demand, concurrency=(each.concurrency,))
            alone = replace(deployment, scenario=replace(scenario, demand=demand))
            predictions[each.concurrency] = predict(alone, each.concurrency)
    return [float(getattr(predictions[each.concurrency], name)) for each, name, _ in figures]


def _slope(slopes: Slopes, concurrency: int, figure: str) -> Matrix:
    if figure == "output_tok_s":
        return slopes.throughput(concurrency)
    return slopes.token_time(concurrency) if figure == "itl_s" else slopes.first_token()


def calibration_text(calibration: Calibration) -> str:
    """What moved, and what is left over."""
    lines = ["calibrated: " + ", ".join(f"{name} x{factor:.2f}" for name, factor in calibration.factors.items())]
    for each in calibration.residuals:
        lines.append(
            f"  concurrency {each.concurrency}, {each.figure}: measured {each.measured:.4g}, predicted "
            f"{each.before:.4g} before and {each.after:.4g} after ({each.after / each.measured - 1:+.1%})"
        )
    return "\n".join(lines)
