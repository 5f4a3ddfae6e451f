"""Divides the layers among stages by the time and memory they take there; stages may be on different devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

Cost = Callable[[int, int, int], float]  # (stage, first layer, end layer) -> seconds; inf where it does not fit


def best_partition(num_layers: int, num_stages: int, cost: Cost) -> tuple[int, ...] | None:
    """Layers per stage such that the slowest stage is as fast as can be; None if no division fits.

    Among equally fast ones, the division with the most even numbers of layers, since KV memory follows them.
    """
    slowest = _search(num_layers, num_stages, lambda total, *part: max(total, cost(*part)))
    if slowest is None:
        return None
    limit = slowest[0] * (1 + 1e-9)
    most_even = _search(
        num_layers,
        num_stages,
        lambda total, *part: total + (part[2] - part[1]) ** 2 if cost(*part) <= limit else float("inf"),
    )
    assert most_even is not None, "the fastest division is within the limit"
    return most_even[1]


def _search(
    num_layers: int, num_stages: int, add: Callable[[float, int, int, int], float]
) -> tuple[float, tuple[int, ...]] | None:
    """Dynamic programming: the least total over all divisions, and the division."""
    infinite = float("inf")
    best = [0.0] + [infinite] * num_layers
    choices: list[list[int]] = []
    for stage in range(num_stages):
        totals, starts = [infinite] * (num_layers + 1), [0] * (num_layers + 1)
        first_end = num_layers if stage == num_stages - 1 else stage + 1
        for end in range(first_end, num_layers - (num_stages - 1 - stage) + 1):
            for start in range(stage, end) if stage else (0,):
                if best[start] < infinite and (total := add(best[start], stage, start, end)) < totals[end]:
                    totals[end], starts[end] = total, start
        best = totals
        choices.append(starts)
    if best[num_layers] == infinite:
        return None
    cuts = [num_layers]
    for starts in reversed(choices):
        cuts.append(starts[cuts[-1]])
    return best[num_layers], tuple(end - start for start, end in pairwise(reversed(cuts)))


def additive_cost(
    layer_s: Sequence[Sequence[float]],
    layer_bytes: Sequence[Sequence[float]],
    extra_s: Sequence[float],
    extra_bytes: Sequence[float],
    usable_bytes: Sequence[float],
) -> Cost:
    """A cost that adds up over layers.

    Args:
        layer_s, layer_bytes: per stage, per layer; what the layer takes if it is there.
        extra_s, extra_bytes: per stage; head, embedding, buffers.
        usable_bytes: per stage.
    """
    sum_s = [[0.0, *accumulate(row)] for row in layer_s]
    sum_bytes = [[0.0, *accumulate(row)] for row in layer_bytes]

    def cost(stage: int, start: int, end: int) -> float:
        needed = sum_bytes[stage][end] - sum_bytes[stage][start] + extra_bytes[stage]
        if needed > usable_bytes[stage]:
            return float("inf")
        return sum_s[stage][end] - sum_s[stage][start] + extra_s[stage]

    return cost
