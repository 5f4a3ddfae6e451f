"""How far a prediction may be off: each parameter's spread, carried through the closed estimate.

The parameters are independent and the estimate is nearly a power of each, so relative spreads add in squares. What the
model leaves out (routing that is not uniform, clocks, kernels that differ between versions) is one spread of its own.
"""

from __future__ import annotations

from math import exp, log, sqrt

from fullbore.plan.formula import best_cycle_s, output_tokens_per_s, prompt_s, running_requests
from fullbore.plan.parameters import SPREADS, scaled
from fullbore.plan.scenario import Deployment

MODEL_SPREAD = 0.10
NINETY_PERCENT = 1.645  # standard deviations on either side


class Uncertainty:
    """The deployment with each parameter one spread worse, built once for all concurrencies."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        parameters = deployment.scenario.parameters
        self._shifted = [
            deployment.with_parameters(scaled(parameters, name, 1 + spread)) for name, spread in SPREADS.items()
        ]

    def throughput(self, concurrency: int) -> float:
        """Relative half-width of the 90 % range of tokens per second, as a logarithm."""
        return self._width([output_tokens_per_s(each, concurrency) for each in [self.deployment, *self._shifted]])

    def token_time(self, concurrency: int) -> float:
        """… of the time between tokens."""
        requests = running_requests(self.deployment, concurrency)
        return self._width([best_cycle_s(each, requests) for each in [self.deployment, *self._shifted]])

    def first_token(self) -> float:
        """… of the time to the first token."""
        return self._width([sum(prompt_s(each)) for each in [self.deployment, *self._shifted]])

    def _width(self, values: list[float]) -> float:
        base, *shifted = values
        variance = MODEL_SPREAD**2 + sum(log(each / base) ** 2 for each in shifted)
        return NINETY_PERCENT * sqrt(variance)


def around(value: float, width: float) -> tuple[float, float]:
    """The range of that logarithmic half-width."""
    return value * exp(-width), value * exp(width)
