"""Divides the layers of a model into contiguous stages so that the slowest stage is as fast as can be. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import median
from typing import TYPE_CHECKING

from fullbore.errors import ConfigError

if TYPE_CHECKING:
    from fullbore.model.spec import ModelSpec

# A layer's norms, rotary embedding, attention over the cache and launches take time that its weights do not show,
# expressed here as bytes that could be read meanwhile. It matters for small models only: the head of SmolLM2-135M has
# as many weights as 8 of its layers, but takes as long as 6 to 7 of them (native backend, 1 to 32 requests).
LAYER_OVERHEAD_BYTES = 4_000_000

DECODE_TOKENS = 8  # tokens in a typical decode micro-batch: how many experts a step reads depends on it


def partition_model(spec: ModelSpec, num_stages: int, head_factor: float = 1.0) -> tuple[int, ...]:
    """Layers per stage for this model, by estimated cost.

    Args:
        head_factor: how much dearer the head is against the layers than estimated, see `head_factor`.

    Raises:
        ConfigError: more stages than layers.
    """
    return partition_layers(layer_costs(spec), num_stages, last_extra=head_factor * head_cost(spec))


def head_factor(spec: ModelSpec, partition: Sequence[int], decode_s: Sequence[Mapping[int, float]]) -> float | None:
    """How much dearer the head, with its norm, is against the layers than estimated, from measured steps.

    Args:
        decode_s: for each stage, requests in a decode micro-batch -> seconds.

    Returns:
        the median over the sizes that all stages have; None where there is one stage only, which cannot tell.
    """
    if len(partition) < 2:
        return None
    costs = layer_costs(spec)
    shares = [sum(costs[start:end]) for start, end in layer_ranges(partition)]
    factors = []
    for size in set.intersection(*(set(times) for times in decode_s)):
        per_cost_s = sum(times[size] for times in decode_s[:-1]) / sum(shares[:-1])
        head_s = decode_s[-1][size] - shares[-1] * per_cost_s
        factors.append(head_s / (per_cost_s * head_cost(spec)))
    return median(factors) if factors else None


def layer_costs(spec: ModelSpec, *, bytes_per_param: int = 4, num_tokens: int = DECODE_TOKENS) -> list[float]:
    """Cost of each layer in one decode step of `num_tokens` requests: bytes of weights read, plus a fixed overhead."""
    return [layer.params_read(num_tokens) * bytes_per_param + LAYER_OVERHEAD_BYTES for layer in spec.layers]


def head_cost(spec: ModelSpec, *, bytes_per_param: int = 4) -> float:
    """Cost of the final norm and the LM head, which the last stage has on top, in the unit of `layer_costs`.

    The first stage's embedding is a lookup of a few rows and costs nothing worth counting.
    """
    return (spec.embedding_params + spec.hidden_size) * bytes_per_param


def partition_layers(
    layer_costs: Sequence[float], num_stages: int, *, first_extra: float = 0.0, last_extra: float = 0.0
) -> tuple[int, ...]:
    """Layers per stage such that the largest stage cost is the smallest possible.

    `first_extra` and `last_extra` are costs that the first and the last stage have on top. Among partitions with the
    same largest cost the one with the most even numbers of layers is taken (KV memory follows them), then the one with
    fewer layers in later stages.

    Raises:
        ConfigError: `num_stages` is not between 1 and the number of layers.
    """
    num_layers = len(layer_costs)
    check_num_stages(num_layers, num_stages)
    prefix = [0, *accumulate(layer_costs)]

    def stage_cost(stage: int, start: int, end: int) -> float:
        extra = (first_extra if stage == 0 else 0) + (last_extra if stage == num_stages - 1 else 0)
        return prefix[end] - prefix[start] + extra

    def larger(largest: float, stage: int, start: int, end: int) -> float:
        return max(largest, stage_cost(stage, start, end))

    limit, _ = _best_partition(num_layers, num_stages, larger)

    def add_square(total: float, stage: int, start: int, end: int) -> float:
        return total + (end - start) ** 2 if stage_cost(stage, start, end) <= limit else float("inf")

    _, partition = _best_partition(num_layers, num_stages, add_square)
    return partition


def _best_partition(
    num_layers: int, num_stages: int, add_stage: Callable[[float, int, int, int], float]
) -> tuple[float, tuple[int, ...]]:
    """Dynamic programming over (stage, end): the smallest total and the layers per stage that give it.

    `add_stage(total, stage, start, end)` is the total with one more stage, which has layers start … end-1.
    """
    best = [float("inf")] + [add_stage(0, 0, 0, end) for end in range(1, num_layers + 1)]
    starts: list[list[int]] = []  # per stage after the first: its first layer, by its end
    for stage in range(1, num_stages):
        totals, chosen = [float("inf")] * (num_layers + 1), [0] * (num_layers + 1)
        for end in range(stage + 1, num_layers + 1):
            for start in range(stage, end):
                total = add_stage(best[start], stage, start, end)
                if total <= totals[end]:  # a later start at the same total: fewer layers in the later stage
                    totals[end], chosen[end] = total, start
        best = totals
        starts.append(chosen)
    cuts = [num_layers]
    for chosen in reversed(starts):
        cuts.append(chosen[cuts[-1]])
    cuts.append(0)
    return best[num_layers], tuple(end - start for start, end in pairwise(reversed(cuts)))


def layer_ranges(partition: Sequence[int]) -> list[tuple[int, int]]:
    """First layer and end (exclusive) of each stage: (17, 13) -> [(0, 17), (17, 30)]."""
    return list(pairwise([0, *accumulate(partition)]))


def check_num_stages(num_layers: int, num_stages: int) -> None:
    """Raises ConfigError unless every stage can have at least one layer."""
    if num_stages < 1:
        raise ConfigError(f"--pp-size must be at least 1, got {num_stages}.")
    if num_stages > num_layers:
        raise ConfigError(
            f"--pp-size {num_stages} is more than the model's {num_layers} layers; "
            f"every stage needs at least one, so use --pp-size {num_layers} or less."
        )


def check_partition(partition: Sequence[int], num_layers: int, num_stages: int) -> None:
    """Checks layers per stage that a user gave.

    Raises:
        ConfigError: not one number per stage, an empty stage, or a sum other than the model's layers.
    """
    check_num_stages(num_layers, num_stages)
    text = ",".join(map(str, partition))
    if len(partition) != num_stages:
        raise ConfigError(
            f"--pp-layer-partition {text} names {len(partition)} stages but --pp-size is {num_stages}; "
            "give one number of layers per stage."
        )
    if min(partition) < 1:
        raise ConfigError(f"--pp-layer-partition {text}: every stage needs at least one layer.")
    if sum(partition) != num_layers:
        raise ConfigError(
            f"--pp-layer-partition {text} adds up to {sum(partition)} layers but the model has {num_layers}."
        )
