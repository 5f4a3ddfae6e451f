"""The likeliest parameters, given measured figures and the parameters' spreads (Gauss-Newton on logarithms,
with slopes that are corrected by what each step showed).

A measurement moves what it tells something about and leaves the rest; what it does not explain is left as residuals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp

import numpy as np

from fullbore.plan.devices import MEASURED_DEVICES
from fullbore.plan.parameters import CostParameters, scaled
from fullbore.plan.scenario import Deployment
from fullbore.plan.uncertainty import NAMES, Matrix, prior_covariance

STEPS = 16
# How many spreads a parameter may move as easily as a figure may be off by its own one: the device's efficiencies were
# measured, or taken from another device.
FREEDOM, FREEDOM_UNMEASURED = 3.0, 10.0


@dataclass(frozen=True)
class Figure:
    """One measured figure, and how far it may be off (one standard deviation, relative)."""

    what: str
    measured: float
    spread: float


@dataclass(frozen=True)
class Residual:
    """A measured figure, and the prediction of it before and after the fit."""

    what: str
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


def fit(
    deployment: Deployment,
    figures: Sequence[Figure],
    evaluate: Callable[[Deployment], Sequence[float]],
    slopes: Callable[[Deployment], Matrix],
    on_progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Fits the deployment's parameters.

    Args:
        evaluate: the figures that a deployment would have.
        slopes: d ln(figure) / d ln(parameter), one row per figure, columns as NAMES; may be approximate.
    """
    start = deployment.scenario.parameters
    devices = {device.name for stage in deployment.stages for device in stage.devices}
    freedom = FREEDOM if devices <= set(MEASURED_DEVICES) else FREEDOM_UNMEASURED
    prior = np.linalg.inv(prior_covariance() * freedom**2)
    weights = np.diag([figure.spread**-2 for figure in figures])
    measured = np.log([figure.measured for figure in figures])

    def unlikelihood(moved: Matrix, logs: Matrix) -> float:
        return float((measured - logs) @ weights @ (measured - logs) + moved @ prior @ moved)

    moved = np.zeros(len(NAMES))  # logarithms of the factors
    first = last = evaluate(deployment)
    logs = np.log(first)
    jacobian = slopes(deployment)
    for step in range(STEPS):
        if on_progress:
            on_progress(step, STEPS)
        normal = jacobian.T @ weights @ jacobian + prior
        change = np.linalg.solve(normal, jacobian.T @ weights @ (measured - logs) - prior @ moved)
        change = np.clip(change, -1.0, 1.0)  # the slopes hold near the point only
        if float(np.abs(change).max()) < 1e-3:
            break
        tried = evaluate(deployment.with_parameters(_moved(start, moved + change)))
        tried_logs = np.log(tried)
        # What the step showed of the slopes (Broyden 1965), be it a good step or not.
        jacobian = jacobian + np.outer(tried_logs - logs - jacobian @ change, change) / (change @ change)
        if unlikelihood(moved + change, tried_logs) < unlikelihood(moved, logs):
            moved, logs, last = moved + change, tried_logs, tried
    fitted = _moved(start, moved)
    if on_progress:
        on_progress(STEPS, STEPS)
    residuals = [
        Residual(figure.what, figure.measured, before, after)
        for figure, before, after in zip(figures, first, last, strict=True)
    ]
    # What remains uncertain: the spreads, less what the measurement tells.
    remaining = np.linalg.inv(jacobian.T @ weights @ jacobian + np.linalg.inv(prior_covariance()))
    factors = {name: exp(float(each)) for name, each in zip(NAMES, moved, strict=True)}
    return Calibration(fitted, factors, remaining, residuals)


def _moved(start: CostParameters, moved: Matrix) -> CostParameters:
    parameters = start
    for name, each in zip(NAMES, moved, strict=True):
        parameters = scaled(parameters, name, exp(float(each)))
    return parameters


def calibration_text(calibration: Calibration) -> str:
    """What moved, and what is left over."""
    lines = ["calibrated: " + ", ".join(f"{name} x{factor:.2f}" for name, factor in calibration.factors.items())]
    lines += [
        f"  {each.what}: measured {each.measured:.4g}, predicted {each.before:.4g} before and {each.after:.4g} after "
        f"({each.after / each.measured - 1:+.1%})"
        for each in calibration.residuals
    ]
    return "\n".join(lines)
