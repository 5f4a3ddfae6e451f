"""What a fix would bring: a comparison of two simulated runs of the same stages, calibrated on the evidence.

The scheduler that is simulated is the engine's own policy where there is a model of it (SGLang's slots), fullbore's
otherwise. Stage times are what the evidence says; prompts cost nothing, so that only decoding is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fullbore.plan.curves import CurveCosts
from fullbore.plan.pipeline import Hop, Pipeline
from fullbore.plan.policy_settings import Scheduling, config_of
from fullbore.plan.sglang_policy import SglangScheduler
from fullbore.plan.simulate import Simulation
from fullbore.plan.workload import closed_loop
from fullbore.scheduler.scheduler import Scheduler

MOST_REQUESTS, MOST_STAGES = 256, 32  # larger deployments are left to the closed forms
_OUTPUT_TOKENS = 48
_ROUNDS = 2  # of requests per client
_PROMPT_TOKENS = 1


@dataclass(frozen=True)
class Run:
    """One deployment to simulate. `decode_s`: seconds of a stage of factor 1 for a micro-batch of so many requests."""

    decode_s: Callable[[int], float]
    stage_factors: Sequence[float]
    requests: int
    engine: str | None = None
    micro_batches: int | None = None  # fullbore's scheduler alone: so many, whatever is best
    max_micro_batch: int | None = None
    exchanges_first: bool = False
    hops_s: Sequence[float] = ()  # latency into each stage after the first

    def changed(self, **changes: object) -> Run:
        return replace(self, **changes)  # type: ignore[arg-type]


def simulated_factor(before: Run, after: Run) -> float | None:
    """Tokens/s after over tokens/s before; None where a simulation would take too long."""
    stages = len(before.stage_factors)
    if max(before.requests, after.requests) > MOST_REQUESTS or stages > MOST_STAGES or stages < 2:
        return None
    if min(*before.stage_factors, *after.stage_factors, before.decode_s(1)) <= 0 or before.requests < 1:
        return None
    slow, fast = _tok_s(before), _tok_s(after)
    return fast / slow if slow > 0 else None


def linear_between(first: tuple[int, float], second: tuple[int, float], num_stages: int) -> Callable[[int], float]:
    """Seconds of one of equal stages, from the times of two sizes over all stages; never below the smaller size's."""
    (small, small_s), (large, large_s) = first, second
    slope = (large_s - small_s) / (large - small) if large > small else 0.0
    return lambda size: max(small_s + slope * (size - small), small_s if size >= small else 0.0) / num_stages


def _tok_s(run: Run) -> float:
    stages = len(run.stage_factors)
    costs = CurveCosts(decode_s=run.decode_s, stage_factors=run.stage_factors)
    workload = closed_loop(run.requests, _ROUNDS * run.requests, _PROMPT_TOKENS, _OUTPUT_TOKENS)
    settings = Scheduling(
        pp=stages,
        depth=0 if run.engine == "sglang" else "auto",
        micro_batches=run.micro_batches or "auto",
        max_micro_batch=run.max_micro_batch or "auto",
        max_running=max(run.requests, stages * (run.max_micro_batch or 1)),
        chunk_tokens=4096,
        num_blocks=run.requests * 8 + 64,
        exchanges_first=run.exchanges_first,
    )
    scheduler = SglangScheduler(settings) if run.engine == "sglang" else Scheduler(config_of(settings))
    hops = [Hop(latency_s=seconds) for seconds in run.hops_s]
    pipeline = Pipeline(num_stages=stages, costs=costs, hops=hops)
    result = Simulation(pipeline, scheduler, workload).run(None)
    return result.steady.output_tokens_per_s
