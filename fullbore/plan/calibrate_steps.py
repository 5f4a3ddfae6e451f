"""Calibration by a recording: what each stage took for micro-batches of each size."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import median

import numpy as np

from fullbore.errors import ConfigError
from fullbore.plan.fitting import Calibration, Figure, fit
from fullbore.plan.loads import Load
from fullbore.plan.parameters import scaled
from fullbore.plan.scenario import Deployment
from fullbore.plan.uncertainty import NAMES, STEP, Matrix
from fullbore.telemetry.accounting import Recording

STEP_SPREAD = 0.05  # of the median of few steps
LEAST_STEPS = 3  # of a size; fewer tell nothing


@dataclass(frozen=True)
class StageTimes:
    """One stage's median time for micro-batches of one size, which either decode or take in prompts."""

    stage: int
    requests: int  # decoding
    prompt_tokens: int
    seconds: float
    num_steps: int

    @property
    def what(self) -> str:
        work = f"{self.prompt_tokens} prompt tokens" if self.prompt_tokens else f"{self.requests} decodes"
        return f"stage {self.stage}, {work}, s"

    def load(self, context: int) -> Load:
        """`context`: cached tokens of a decoding request. A chunk counts as the first of its prompt."""
        if self.prompt_tokens:
            return Load(0, self.prompt_tokens, self.prompt_tokens**2, 1)
        return Load(self.requests, sampled=self.requests, context_tokens=self.requests * context)


def stage_times(recording: Recording) -> list[StageTimes]:
    """By stage and size, of micro-batches that do not mix prompts with decoding.

    Raises:
        ConfigError: there are none that decode.
    """
    sizes = {
        record.micro_batch_id: (record.num_decodes, record.prefill_tokens)
        for record in recording.driver_records
        if record.event == "launch" and not (record.num_decodes and record.prefill_tokens)
    }
    seen: defaultdict[tuple[int, int, int], list[float]] = defaultdict(list)
    for record in recording.stage_records:
        if record.micro_batch_id in sizes:
            busy_s = (record.sample_end_ns - record.compute_start_ns) * 1e-9
            seen[record.stage, *sizes[record.micro_batch_id]].append(busy_s)
    times = [
        StageTimes(*key, median(seconds), len(seconds))
        for key, seconds in sorted(seen.items())
        if len(seconds) >= LEAST_STEPS and median(seconds) > 0
    ]
    if not any(each.requests for each in times):
        raise ConfigError("--calibrate: the recording holds no steady decoding; record while requests are answered.")
    return times


def calibrate_steps(deployment: Deployment, times: list[StageTimes]) -> Calibration:
    """Fits the parameters to the stages' own times; the deployment must have the recorded layers per stage."""
    figures = [Figure(each.what, each.seconds, STEP_SPREAD / sqrt(min(each.num_steps, 25))) for each in times]
    demand = deployment.scenario.demand
    context = demand.input_tokens + demand.output_tokens // 2

    def evaluate(current: Deployment) -> list[float]:
        return [current.costs.stages[each.stage].seconds(each.load(context)) for each in times]

    def slopes(current: Deployment) -> Matrix:
        base = [log(seconds) for seconds in evaluate(current)]
        columns = []
        for name in NAMES:
            shifted = current.with_parameters(scaled(current.scenario.parameters, name, exp(STEP)))
            columns.append(
                [(log(after) - before) / STEP for after, before in zip(evaluate(shifted), base, strict=True)]
            )
        return np.array(columns).T

    return fit(deployment, figures, evaluate, slopes)
