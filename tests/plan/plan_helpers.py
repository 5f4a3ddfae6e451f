"""Short ways to simulate what the tests need."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

from fullbore.plan.curves import CurveCosts, decode_curve
from fullbore.plan.measure import SimulationResult
from fullbore.plan.pipeline import Hop, Pipeline
from fullbore.plan.simulate import kv_blocks_for, simulate
from fullbore.plan.workload import Workload, closed_loop
from fullbore.scheduler.scheduler import SchedulerConfig

MS = 1e-3


def pipeline(
    factors: Sequence[float],
    *,
    curve: str = "flat",
    stage_s: float = 1.0,
    reference: int = 1,
    prefill_token_s: float = 0.0,
    prefill_token_pair_s: float = 0.0,
    driver_s: float = 0.0,
    hop: Hop | None = None,
) -> Pipeline:
    """Stage i takes factors[i] · stage_s for a decode micro-batch of `reference` requests."""
    costs = CurveCosts(
        decode_s=decode_curve(curve, reference, stage_s),
        stage_factors=factors,
        prefill_token_s=prefill_token_s,
        prefill_token_pair_s=prefill_token_pair_s,
    )
    hops = [] if hop is None else [hop] * (len(factors) - 1)
    return Pipeline(num_stages=len(factors), costs=costs, driver_s=driver_s, hops=hops)


def run(pipe: Pipeline, work: Workload, **settings: Any) -> SimulationResult:
    """Simulates; `settings` go to `simulate` if it knows them, else to the scheduler."""
    own = {name: settings.pop(name) for name in ("is_probed", "learns", "record_until_s") if name in settings}
    settings = {
        "pp_size": pipe.num_stages,
        "num_kv_blocks": kv_blocks_for(work),
        "max_running_requests": work.concurrency or len(work.jobs),
        **settings,
    }
    return simulate(pipe, SchedulerConfig(**settings), work, **own)


def endless(concurrency: int, output_tokens: int = 48) -> Workload:
    """Equal requests that all decode through the whole steady window."""
    return closed_loop(concurrency, concurrency, 1, output_tokens)


def busy_over_cycles(result: SimulationResult, stage: int, micro_batches: int) -> float:
    """Busy fraction of a stage from the start of a micro-batch in mid-run to that of the one `micro_batches` later."""
    spans = [record for record in result.spans if record.stage == stage]
    spans = spans[len(spans) // 2 :][: micro_batches + 1]
    busy_ns = sum(record.sample_end_ns - record.compute_start_ns for record in spans[:-1])
    return busy_ns / (spans[-1].compute_start_ns - spans[0].compute_start_ns)


def half_a_stage_s(pipe: Pipeline, concurrency: int) -> float:
    """Half the time of a stage for a decode micro-batch of ⌈C/P⌉ requests."""
    from fullbore.plan.loads import Load

    return pipe.costs.seconds(Load(decodes=ceil(concurrency / pipe.num_stages)))[0] / 2
