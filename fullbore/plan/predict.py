"""What a deployment delivers: the scheduler on a virtual clock, and what bounds the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

from fullbore.errors import OutOfMemoryError
from fullbore.plan.coarse import EXACT, CoarseCosts, Grain, coarse_hops, grain_for
from fullbore.plan.cost_model import HEAD, WEIGHTS
from fullbore.plan.devices import MEASURED_DEVICES
from fullbore.plan.formula import running_requests
from fullbore.plan.loads import Load
from fullbore.plan.measure import Figures, SimulationResult
from fullbore.plan.pipeline import Pipeline, tell_delays
from fullbore.plan.policies import make_scheduler
from fullbore.plan.policy_settings import Scheduling
from fullbore.plan.scenario import Deployment
from fullbore.plan.simulate import Simulation
from fullbore.plan.uncertainty import Uncertainty, around
from fullbore.plan.workload import Job, Workload, poisson
from fullbore.scheduler.cost import CostModel, sizes_to_measure

PAGE_TOKENS = 16
FIRST_GENERATION_SHARE = 4  # the first answers, which only fill the pipeline, are this much shorter
RATE_REQUESTS = 200
NEARLY_FULL = 0.85  # of the time; above it, the busiest stage's work is what bounds throughput

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One layout at one concurrency. `range` is that of `output_tok_s`, 90 %."""

    deployment: Deployment
    concurrency: int
    output_tok_s: float
    total_tok_s: float
    ttft_s: float
    itl_s: float
    stage_busy: tuple[float, ...]
    micro_batches: float  # in flight, on average over time
    micro_batch_size: float
    bound_by: str
    range: tuple[float, float]
    ttft_range_s: tuple[float, float]
    itl_range_s: tuple[float, float]
    notes: tuple[str, ...]

    @property
    def tok_s_per_user(self) -> float:
        return 1 / self.itl_s if self.itl_s else 0.0

    @property
    def tok_s_per_device(self) -> float:
        return self.output_tok_s / self.deployment.layout.num_devices

    def to_json(self) -> dict[str, Any]:
        """Plain types; times in seconds."""
        layout = self.deployment.layout
        return {
            "pp": layout.pp,
            "tp": layout.tp,
            "replicas": layout.replicas,
            "partition": list(self.deployment.partition),
            "micro_batches": layout.micro_batches,
            "depth": layout.depth,
            "chunk_tokens": self.deployment.chunk_tokens,
            "graphs": layout.graphs,
            "dp_attention": layout.dp_attention,
            "concurrency": self.concurrency,
            "output_tok_s": round(self.output_tok_s, 3),
            "total_tok_s": round(self.total_tok_s, 3),
            "ttft_s": round(self.ttft_s, 6),
            "itl_s": round(self.itl_s, 6),
            "stage_busy": [round(each, 4) for each in self.stage_busy],
            "micro_batches_in_flight": round(self.micro_batches, 2),
            "requests_per_micro_batch": round(self.micro_batch_size, 2),
            "bound_by": self.bound_by,
            "range": [round(each, 3) for each in self.range],
            "ttft_range_s": [round(each, 6) for each in self.ttft_range_s],
            "itl_range_s": [round(each, 6) for each in self.itl_range_s],
            "fits": True,
            "cache_tokens": self.deployment.memory.cache_tokens * layout.replicas,
            "notes": list(self.notes),
        }


def predict(
    deployment: Deployment,
    concurrency: int,
    uncertainty: Uncertainty | None = None,
    on_progress: Progress | None = None,
) -> Prediction:
    """Simulates `concurrency` clients (or the demand's arrival rate; `concurrency` is then what results).

    Raises:
        OutOfMemoryError: the deployment does not fit.
    """
    if deployment.problem:
        raise OutOfMemoryError(
            f"{deployment.scenario.model.name} does not fit as {deployment.layout.name}: {deployment.problem}."
        )
    demand, layout = deployment.scenario.demand, deployment.layout
    if demand.rate_per_s is not None:
        grain = Grain()
        rate = demand.rate_per_s / layout.replicas
        workload = poisson(rate, RATE_REQUESTS, demand.input_tokens, demand.output_tokens)
    else:
        clients = max(ceil(concurrency / layout.replicas), 1)
        grain = grain_for(clients, demand.output_tokens)
        workload = _closed_loop(deployment, clients, grain)
    figures = simulate_workload(deployment, workload, grain, on_progress).steady
    share = _share_of_replica(concurrency, layout.replicas) if demand.rate_per_s is None else layout.replicas
    output_tok_s = figures.output_tokens_per_s * grain.requests * grain.tokens * share
    itl_s = figures.itl.mean_s / grain.tokens
    ttft_s = figures.ttft.mean_s
    if demand.rate_per_s is not None:
        resident_s = ttft_s + itl_s * (demand.output_tokens - 1)
        concurrency = max(round(demand.rate_per_s * resident_s), 1)
    uncertainty = uncertainty or Uncertainty(deployment)
    return Prediction(
        deployment=deployment,
        concurrency=concurrency,
        output_tok_s=output_tok_s,
        total_tok_s=output_tok_s * demand.length_tokens / demand.output_tokens,
        ttft_s=ttft_s,
        itl_s=itl_s,
        stage_busy=tuple(figures.stage_busy),
        micro_batches=figures.micro_batches_in_flight_mean,
        micro_batch_size=figures.requests_per_micro_batch * grain.requests,
        bound_by=_bound_by(deployment, concurrency, figures, grain),
        range=around(output_tok_s, uncertainty.throughput(concurrency)),
        ttft_range_s=around(ttft_s, uncertainty.first_token()),
        itl_range_s=around(itl_s, uncertainty.token_time(concurrency)),
        notes=(*_notes(deployment, concurrency), *_overload(deployment, output_tok_s)),
    )


def _share_of_replica(concurrency: int, replicas: int) -> float:
    """What all replicas deliver together, in units of one with ⌈C/replicas⌉ clients."""
    return concurrency / max(-(-concurrency // replicas), 1) if concurrency >= replicas else concurrency


def _closed_loop(deployment: Deployment, clients: int, grain: Grain) -> Workload:
    """All clients start at once, as in a benchmark; the steady window then holds one whole generation of answers."""
    demand = deployment.scenario.demand
    number = grain.jobs(clients)
    prompt, output = grain.length(demand.input_tokens), grain.length(demand.output_tokens)
    shared = grain.length(demand.input_tokens - demand.computed_input_tokens) if demand.prefix_hit_rate else 0
    first = max(output // FIRST_GENERATION_SHARE, 1)
    jobs = [Job(prompt, first, shared_prefix_tokens=shared)] * number
    jobs += [Job(prompt, output, shared_prefix_tokens=shared)] * max(number, 2)
    return Workload(jobs, number)


def simulate_workload(
    deployment: Deployment, workload: Workload, grain: Grain = EXACT, on_progress: Progress | None = None
) -> SimulationResult:
    """One replica under any workload, which is given in the units of `grain`; so are the result's tokens and times."""
    scenario, layout = deployment.scenario, deployment.layout
    running = running_limit(deployment)
    crowded = deployment.costs.crowded
    pipeline = Pipeline(
        num_stages=layout.pp,
        costs=CoarseCosts(deployment.costs, grain, deployment.chunk_tokens),
        crowded_costs=None if crowded is None else CoarseCosts(crowded, grain, deployment.chunk_tokens),
        hops=coarse_hops(deployment.costs.hops(), grain),
        driver_s=deployment.driver_s * grain.tokens,
    )
    cap = layout.max_micro_batch
    scheduler = make_scheduler(
        scenario.engine,
        Scheduling(
            pp=layout.pp,
            depth=layout.depth,
            micro_batches=layout.micro_batches,
            max_micro_batch=cap if cap == "auto" else max(cap // grain.requests, 1),
            max_running=max(running // grain.requests, 1),
            chunk_tokens=max(deployment.chunk_tokens // grain.requests, 1),
            num_blocks=max(deployment.memory.cache_tokens // grain.requests // grain.tokens // PAGE_TOKENS, 1),
            page_tokens=PAGE_TOKENS,
            has_prefix_cache=scenario.demand.prefix_hit_rate > 0,
            exchanges_first=scenario.engine.exchanges_first,
            dynamic_chunks=scenario.engine.dynamic_chunks,
        ),
    )
    _teach(scheduler.costs, pipeline, deployment, grain, max(running // grain.requests, 1))
    return Simulation(pipeline, scheduler, workload).run(on_progress)


def _teach(costs: CostModel, pipeline: Pipeline, deployment: Deployment, grain: Grain, most: int) -> None:
    """What a scheduler that has served this demand for a while knows: decode and prefill times, and delays."""
    demand = deployment.scenario.demand
    prompt = grain.length(demand.input_tokens)
    context = prompt + grain.length(demand.output_tokens) // 2
    for size in sizes_to_measure(most):
        load = Load(size, sampled=size, context_tokens=size * context)
        for stage, seconds in enumerate(pipeline.costs.seconds(load)):
            costs.seed_decode(stage, size, seconds)
    chunk = min(max(deployment.chunk_tokens // grain.requests, 1), prompt)
    for tokens in {max(chunk // 4, 1), max(chunk // 2, 1), chunk}:
        for earlier in (0, (prompt - tokens) // 2, prompt - tokens):
            pairs = (earlier + tokens) ** 2 - earlier**2
            load = Load(0, tokens, pairs, 1, earlier)
            for stage, seconds in enumerate(pipeline.costs.seconds(load)):
                costs.observe(stage, 0, tokens, pairs, seconds)
    for fit in costs.prefill:
        fit.refit()
    tell_delays(costs, pipeline)


def running_limit(deployment: Deployment) -> int:
    """Most requests that one replica runs at once."""
    scenario = deployment.scenario
    limit = scenario.max_running or max(scenario.engine.max_batch, *scenario.demand.concurrency, 1)
    limit = max(limit // deployment.layout.replicas, 1)
    if scenario.engine.is_admission_reserved:
        limit = min(limit, max(deployment.memory.cache_tokens // scenario.demand.length_tokens, 1))
    return limit


# ------------------------------------------------------------------------------------------------- what bounds it


def _bound_by(deployment: Deployment, concurrency: int, figures: Figures, grain: Grain) -> str:
    """Why throughput is not higher: an idle pipeline's reason first, then the largest part of the stages' work."""
    layout, busiest = deployment.layout, max(figures.stage_busy)
    running = running_requests(deployment, concurrency)
    work = dominant_work(deployment, figures, grain)
    if busiest >= NEARLY_FULL:
        is_memory_bound = running < ceil(concurrency / layout.replicas)
        return f"memory, {work}" if is_memory_bound else work
    if layout.pp == 1:
        return f"host, {work}"  # between steps, nothing else can keep a lone stage waiting
    if running < layout.pp:
        return f"few-requests, {work}"
    if figures.micro_batches_in_flight_mean < 0.75 * min(layout.pp, running):
        return f"packed, {work}"
    if sum(figures.stage_busy) / len(figures.stage_busy) < 0.85 * busiest:
        return f"imbalance, {work}"
    return f"uneven, {work}"


def dominant_work(deployment: Deployment, figures: Figures, grain: Grain) -> str:
    """What takes most of the time of a typical decode micro-batch: on the stage that gates, or along the whole way."""
    busiest = max(range(len(figures.stage_busy)), key=lambda stage: figures.stage_busy[stage])
    is_gated = figures.stage_busy[busiest] >= NEARLY_FULL
    stages = [deployment.costs.stages[busiest]] if is_gated else deployment.costs.stages
    demand = deployment.scenario.demand
    size = max(round(figures.requests_per_micro_batch * grain.requests), 1)
    load = Load(size, sampled=size, context_tokens=size * (demand.input_tokens + demand.output_tokens // 2))
    parts: Counter[str] = Counter()
    for stage in stages:
        parts.update(stage.breakdown(load))
    parts[WEIGHTS] += parts.pop(HEAD)
    return max(parts, key=lambda name: parts[name])


def _overload(deployment: Deployment, output_tok_s: float) -> tuple[str, ...]:
    demand = deployment.scenario.demand
    if demand.rate_per_s is None or output_tok_s > 0.85 * demand.rate_per_s * demand.output_tokens:
        return ()
    return (f"{demand.rate_per_s:g} requests/s are more than it can serve; the longer they come, the longer they wait",)


def _notes(deployment: Deployment, concurrency: int) -> tuple[str, ...]:
    """What was not measured near this point, so that the figures are extrapolations."""
    scenario = deployment.scenario
    notes = []
    others = sorted({device.name for stage in deployment.stages for device in stage.devices} - set(MEASURED_DEVICES))
    if others:
        notes.append(f"extrapolated: efficiencies of {', '.join(others)} are its generation's, not measured")
    if scenario.demand.length_tokens > scenario.model.context_length:
        notes.append(f"extrapolated: longer than the model's context of {scenario.model.context_length} tokens")
    if concurrency / deployment.layout.replicas / deployment.layout.pp > 512:
        notes.append("extrapolated: micro-batches of more than 512 requests")
    if deployment.layout.tp > 8:
        notes.append("extrapolated: all-reduces over more than 8 ranks")
    if running_requests(deployment, concurrency) < ceil(concurrency / deployment.layout.replicas):
        notes.append(
            f"the KV cache holds {deployment.memory.cache_tokens} tokens per replica; "
            f"some of the {concurrency} requests wait"
        )
    return tuple(notes)
