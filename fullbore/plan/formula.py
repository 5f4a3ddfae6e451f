"""A closed estimate of a deployment's steady throughput: for pruning a search and for ranges, never for the figures.

seconds per generation = output tokens · max(Σ s + Σ h + c, m · max s) + C · prompt's seconds on the slowest stage
"""

from __future__ import annotations

from math import ceil

from fullbore.plan.loads import Load
from fullbore.plan.scenario import Deployment


def cycle_s(deployment: Deployment, requests: int, micro_batches: int) -> float:
    """Seconds in which each of `requests` decoding requests gets one token."""
    demand = deployment.scenario.demand
    size = ceil(requests / micro_batches)
    context = size * (demand.input_tokens + demand.output_tokens // 2)
    load = Load(size, sampled=size, context_tokens=context)
    costs = deployment.costs
    seconds = (costs.crowded or costs if requests > 1 else costs).seconds(load)
    hops_s = sum(hop.latency_s + size * hop.token_s for hop in deployment.costs.hops())
    return max(sum(seconds) + hops_s + deployment.driver_s, micro_batches * max(seconds))


def best_cycle_s(deployment: Deployment, requests: int) -> float:
    """The shortest cycle that the layout's settings allow."""
    layout = deployment.layout
    limit = 2 * layout.pp if layout.depth == "auto" else layout.pp + layout.depth
    if layout.micro_batches != "auto":
        candidates = [min(layout.micro_batches, requests)]
    else:
        candidates = list(range(1, min(limit, requests) + 1))
    return min(cycle_s(deployment, requests, number) for number in candidates)


def prompt_s(deployment: Deployment) -> list[float]:
    """Seconds that one prompt takes on each stage, in chunks."""
    demand = deployment.scenario.demand
    remaining, context = demand.computed_input_tokens, demand.input_tokens - demand.computed_input_tokens
    totals = [0.0] * deployment.layout.pp
    chunks = ceil(remaining / deployment.chunk_tokens)
    # A middle chunk stands for all of them: costs are linear in tokens and in pairs.
    size = ceil(remaining / chunks)
    middle = context + (remaining - size) // 2
    pairs = (middle + size) ** 2 - middle**2
    for stage, seconds in enumerate(deployment.costs.seconds(Load(0, size, pairs, 1, middle))):
        totals[stage] = seconds * chunks
    return totals


def running_requests(deployment: Deployment, concurrency: int) -> int:
    """How many of `concurrency` requests one replica runs at once, given its KV cache."""
    scenario = deployment.scenario
    demand, replicas = scenario.demand, deployment.layout.replicas
    wanted = ceil(concurrency / replicas)
    if scenario.max_running is not None:
        wanted = min(wanted, max(scenario.max_running // replicas, 1))
    typical = demand.length_tokens
    if not scenario.engine.is_admission_reserved:
        typical = demand.input_tokens + ceil(demand.output_tokens / 2)
    return max(min(wanted, deployment.memory.cache_tokens // typical), 1)


def output_tokens_per_s(deployment: Deployment, concurrency: int) -> float:
    """Tokens per second of all replicas."""
    requests = running_requests(deployment, concurrency)
    demand = deployment.scenario.demand
    decode_s = demand.output_tokens * best_cycle_s(deployment, requests)
    prefill_s = requests * max(prompt_s(deployment))
    return deployment.layout.replicas * requests * demand.output_tokens / (decode_s + prefill_s)
