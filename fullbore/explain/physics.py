"""The closed forms that verdicts rest on. Pure arithmetic; docs/verdicts.md explains each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import ceil


def cycle_s(stage_s: Sequence[float], micro_batches: int, overhead_s: float = 0.0) -> float:
    """Time in which every running request gets one token: max(Σ s + overhead, m · max s)."""
    return max(sum(stage_s) + overhead_s, micro_batches * max(stage_s))


def distinct_experts(tokens: float, experts: int, per_token: int) -> float:
    """U(b) = E·(1 - (1 - k/E)^b)."""
    missed: float = (1 - per_token / experts) ** tokens
    return experts * (1 - missed)


def ring_period(stage_times: Sequence[float]) -> float:
    """Period when results are exchanged before the launch with nothing to spare: Σ s / (P - 1)."""
    return sum(stage_times) / (len(stage_times) - 1)


def ring_cap(num_stages: int) -> float:
    """The most that a stage can be busy then: (P - 1) / P."""
    return (num_stages - 1) / num_stages


def fill_efficiency(micro_batches: float, num_stages: int) -> float:
    """Share of its time that a stage works when m micro-batches pass P stages once: m / (m + P - 1)."""
    return micro_batches / (micro_batches + num_stages - 1)


def all_reduce_bytes_per_token(layers: int, hidden: int, ranks: int, bytes_per_value: int = 2) -> float:
    """What each rank sends for one token under tensor parallelism: two ring all-reduces per layer."""
    return 2 * layers * hidden * bytes_per_value * 2 * (ranks - 1) / ranks


def hop_bytes_per_token(hidden: int, bytes_per_value: int = 2) -> float:
    """What one stage sends to the next for one token: hidden state and residual."""
    return 2 * hidden * bytes_per_value


def default_partition(engine: str | None, layers: int, num_stages: int) -> list[int]:
    """How an engine cuts layers when it is not told: SGLang gives the remainder to the last stages."""
    base, rest = divmod(layers, num_stages)
    if engine == "vllm":  # the remainder avoids the last stage, and the first where it can
        extra = list(range(num_stages - 2, -1, -1))[:rest] if rest < num_stages else []
        return [base + (stage in extra) for stage in range(num_stages)]
    return [base + (stage >= num_stages - rest) for stage in range(num_stages)]


def old_default_partition(layers: int, num_stages: int) -> list[int]:
    """How older releases of SGLang and vLLM cut layers: the whole remainder on the last stage."""
    base, rest = divmod(layers, num_stages)
    return [base] * (num_stages - 1) + [base + rest]


def balanced_partition(layer_costs: Sequence[float], num_stages: int, fixed: Sequence[float] = ()) -> list[int]:
    """Contiguous layers per stage: the least costly largest stage, and of those splits the most even one.

    Args:
        layer_costs: cost of each layer, in the model's order; at least `num_stages` of them.
        fixed: what a stage costs without layers (the head on the last), one per stage.
    """
    fixed = list(fixed) or [0.0] * num_stages
    sums = [0.0, *accumulate(layer_costs)]
    count = len(layer_costs)
    # best[k]: (largest stage, sum of squares, minus layers per stage) for the first k layers on the stages so far; of
    # equals the one with more layers on the first stages wins, since the last one has the head
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(num_stages):
        following: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for used, (largest, squares, sizes) in best.items():
            for end in range(used + 1, count - (num_stages - stage - 1) + 1):
                cost = round((sums[end] - sums[used] + fixed[stage]) / sums[-1], 9)  # rounded, so that equals are equal
                found = (max(largest, cost), round(squares + cost * cost, 9), (*sizes, used - end))
                if end not in following or found < following[end]:
                    following[end] = found
        best = following
    return [-size for size in best[count][2]]


def stage_costs(layer_costs: Sequence[float], partition: Sequence[int]) -> list[float]:
    """What each stage costs when its layers are cut out of the model's in order."""
    edges = [0, *accumulate(partition)]
    return [sum(layer_costs[begin:end]) for begin, end in pairwise(edges)]


def weighted_partition(layers: int, speeds: Sequence[float]) -> list[int]:
    """Layers in proportion to each stage's speed, adding up to `layers`, at least one each."""
    total = sum(speeds)
    exact = [layers * speed / total for speed in speeds]
    sizes = [max(int(x), 1) for x in exact]
    by_rest = sorted(range(len(sizes)), key=lambda n: exact[n] - int(exact[n]), reverse=True)
    for stage in by_rest * ceil(layers / len(sizes)):
        if sum(sizes) >= layers:
            break
        sizes[stage] += 1
    while sum(sizes) > layers:
        sizes[sizes.index(max(sizes))] -= 1
    return sizes
