"""How far a prediction may be off: what is uncertain about the parameters, carried through the closed estimate.

The estimate is nearly a power of each parameter, so relative errors add in squares (by the covariance of the
parameters' logarithms, which is diagonal unless they were calibrated). What the model leaves out (routing that is not
uniform, clocks, kernels that differ between versions) is one spread of its own.
"""

from __future__ import annotations

from math import exp

import numpy as np
from numpy.typing import NDArray

from fullbore.plan.formula import best_cycle_s, output_tokens_per_s, prompt_s, running_requests
from fullbore.plan.parameters import SPREADS, scaled
from fullbore.plan.scenario import Deployment

MODEL_SPREAD = 0.10
NINETY_PERCENT = 1.645  # standard deviations on either side
STEP = 0.1  # of a parameter's logarithm, for the slopes

NAMES = tuple(SPREADS)
Matrix = NDArray[np.float64]


def prior_covariance() -> Matrix:
    """Of the parameters' logarithms, before any measurement."""
    return np.diag([spread**2 for spread in SPREADS.values()])


class Slopes:
    """How the closed estimate of a deployment reacts to each parameter; built once for all concurrencies."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        parameters = deployment.scenario.parameters
        self._shifted = [deployment.with_parameters(scaled(parameters, name, exp(STEP))) for name in NAMES]

    def throughput(self, concurrency: int) -> Matrix:
        """d ln(tokens per second) / d ln(parameter), for each of NAMES."""
        return self._slopes([output_tokens_per_s(each, concurrency) for each in [self.deployment, *self._shifted]])

    def token_time(self, concurrency: int) -> Matrix:
        """… of the time between tokens."""
        requests = running_requests(self.deployment, concurrency)
        return self._slopes([best_cycle_s(each, requests) for each in [self.deployment, *self._shifted]])

    def first_token(self) -> Matrix:
        """… of the time to the first token."""
        return self._slopes([sum(prompt_s(each)) for each in [self.deployment, *self._shifted]])

    def _slopes(self, values: list[float]) -> Matrix:
        logs = np.log(np.array(values))
        slopes: Matrix = (logs[1:] - logs[0]) / STEP
        return slopes


class Uncertainty:
    """90 % ranges of a deployment's figures, as logarithmic half-widths."""

    def __init__(self, deployment: Deployment, covariance: Matrix | None = None) -> None:
        self._slopes = Slopes(deployment)
        self._covariance = prior_covariance() if covariance is None else covariance

    def throughput(self, concurrency: int) -> float:
        return self._width(self._slopes.throughput(concurrency))

    def token_time(self, concurrency: int) -> float:
        return self._width(self._slopes.token_time(concurrency))

    def first_token(self) -> float:
        return self._width(self._slopes.first_token())

    def _width(self, slopes: Matrix) -> float:
        variance = MODEL_SPREAD**2 + float(slopes @ self._covariance @ slopes)
        return NINETY_PERCENT * float(np.sqrt(variance))


def around(value: float, width: float) -> tuple[float, float]:
    """The range of that logarithmic half-width."""
    return value * exp(-width), value * exp(width)
