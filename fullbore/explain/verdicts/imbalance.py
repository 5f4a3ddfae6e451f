"""imbalance: with enough micro-batches the slowest stage sets the cycle, m · max s (sglang#13282, sglang#9798).

With few requests it does not matter: then the sum of the stages' times counts, not the largest.
"""

from __future__ import annotations

import re

from fullbore.explain.busy import is_low_power, stage_times_ms
from fullbore.explain.facts import Fact, show
from fullbore.explain.fixes import partition
from fullbore.explain.gains import Run, simulated_factor
from fullbore.explain.physics import balanced_partition, old_default_partition, stage_costs, weighted_partition
from fullbore.explain.situation import Situation
from fullbore.explain.stage_layers import given_layers, stage_layers, stage_weights_gb, total_layers
from fullbore.explain.verdicts.finding import Finding, Gain
from fullbore.plan.devices import device_named

_GATES = 0.85  # a stage busier than this has nothing left
_UNEVEN = 1.2  # busiest over mean of all
_POWER_UNEVEN = 1.25
_UNEVEN_MEMORY = 1.15  # in use on the fullest stage over the mean of the others
_NO_MEMORY_LEFT = 0.95
_UNEVEN_SIZE = 1.25  # largest over mean of layers or weights
_SAME_COST = 1.08  # layers whose costs differ by less are taken as equal


def imbalance(s: Situation) -> Finding | None:
    return _while_serving(s) or _at_start(s) or _out_of_memory(s)


def _while_serving(s: Situation) -> Finding | None:
    stages = s.P
    if stages is None or stages < 2 or s.progress.is_frozen or not _pace_is_set_by_slowest(s):
        return None
    uneven = _by_work(s)
    if uneven is None:
        return None
    slow, shares, strength, facts = uneven
    layers = stage_layers(s)
    name = f"stage {slow} (PP{slow}{', the last stage' if slow == stages - 1 else ''}{_gpu_names(s, slow)})"
    summary = (
        f"{name} is the slowest: it works {shares[slow]:.0%} of the time while the others work "
        f"{_others(shares, slow)}; the whole pipeline runs at its pace."
    )
    if layers is not None:
        summary += f" It holds {layers.value[slow]} of {sum(layers.value)} layers."
    after, gain = _rebalanced(s, shares, layers)
    finding = Finding(
        "imbalance",
        strength,
        summary,
        evidence=[*facts, *([layers] if layers else []), *stage_weights_gb(s)],
        fix=partition(s, after) if after else ["give that stage fewer layers, in proportion to its measured time"],
        gain=gain,
        verify="after the change all stages should be equally busy, within a layer's worth",
        precedent="sglang#13282, sglang#9798, vllm#14120",
    )
    if layers is None:
        finding.unexplained = "how many layers each stage has, and so the exact new split"
    return finding


def _pace_is_set_by_slowest(s: Situation) -> bool:
    """At least as many micro-batches as stages, as far as is known."""
    if s.load.slots is not None and s.P is not None:
        return s.load.slots > 0.75 * s.P
    return s.load.most is None or s.P is None or s.load.known is None or s.load.known >= s.P or s.is_saturated


def _by_work(s: Situation) -> tuple[int, list[float], float, list[Fact]] | None:
    """(slowest stage, busy shares, strength, facts) if one stage is full while others wait for it."""
    busy, times = s.busy, stage_times_ms(s.evidence, s.P)
    if busy is None and times is not None and s.is_saturated:
        largest = max(times.value)
        shares = [time / largest for time in times.value]
        if len(shares) / sum(shares) >= _UNEVEN:
            return shares.index(1.0), shares, 0.75, [times]
        return None
    if busy is None or not busy.is_trusted:
        return _by_power(s) or _by_share(s)
    slow = busy.shares.index(max(busy.shares))
    if busy.shares[slow] < _GATES or busy.spread < _UNEVEN:
        return None
    strength = 0.85 if busy.kind != "utilisation" or not _others_spin(s, slow) else 0.7
    if s.load.known is None and s.load.slots is None and not s.is_saturated:
        strength -= 0.25
    return slow, busy.shares, strength, busy.facts


def _by_power(s: Situation) -> tuple[int, list[float], float, list[Fact]] | None:
    """All spin at 100 %: the one that works draws the power."""
    busy = s.busy
    power = [sum(gpu.load.power_w.mean for gpu in stage if gpu.load.power_w) for stage in s.stages]
    if busy is None or not power or min(power) <= 0 or max(power) / (sum(power) / len(power)) < _POWER_UNEVEN:
        return None
    slow = power.index(max(power))
    if any(is_low_power(gpu) for gpu in s.stages[slow]):
        return None
    text = (
        f"stage {slow} draws {show(max(power))} W, the others {show((sum(power) - max(power)) / (len(power) - 1))} W "
        "on average"
    )
    shares = [p / max(power) for p in power]
    return slow, shares, 0.55, [*busy.facts, Fact(text, max(power), s.stages[slow][0].where)]


def _by_share(s: Situation) -> tuple[int, list[float], float, list[Fact]] | None:
    """Nothing shows the stages' times: on equal cards they are as their layers, or weights, are."""
    enough = s.is_saturated or (s.load.slots is not None and s.P is not None and s.load.slots > 0.75 * s.P)
    sizes, facts = _sizes(s)
    if not enough or _cards_differ(s) or not sizes or len(sizes) * max(sizes) / sum(sizes) < _UNEVEN_SIZE:
        return None
    shares = [size / max(sizes) for size in sizes]
    return shares.index(1.0), shares, 0.6, facts


def _sizes(s: Situation) -> tuple[list[float], list[Fact]]:
    """Layers of each stage as stated, or the weights that each has loaded."""
    given, weights = given_layers(s), stage_weights_gb(s)
    if given is not None:
        return [float(n) for n in given.value], [given]
    return [fact.number for fact in weights], weights


def _at_start(s: Situation) -> Finding | None:
    """Out of memory on the one stage that holds much more than the others."""
    mark = s.evidence.logs.marks.get("out-of-memory", "no-kv-memory")
    sizes, facts = _sizes(s)
    layers = stage_layers(s)
    if mark is None or s.speed.tok_s is not None or s.P is None or s.P < 2 or _cards_differ(s):
        return None
    if not sizes and (older := _older_default(s, mark.text)) is not None:
        sizes, facts, layers = [float(n) for n in older.value], [older], older
    if not sizes and layers is not None:
        sizes, facts = [float(n) for n in layers.value], [layers]
    if not sizes or len(sizes) * max(sizes) / sum(sizes) < _UNEVEN_SIZE:
        return None
    largest = sizes.index(max(sizes))
    total = total_layers(s)
    after = balanced_partition([1.0] * int(total.number), s.P) if total is not None and total.number >= s.P else []
    held = f"{layers.value[largest]} of {sum(layers.value)} layers" if layers is not None else f"{show(max(sizes))} GB"
    return Finding(
        "imbalance",
        0.85,
        f"The engine does not start: it runs out of memory, and stage {largest} "
        f"(PP{largest}{', the last stage' if largest == s.P - 1 else ''}) holds {held}, far more than the others.",
        evidence=[mark.fact(), *facts, *([layers] if layers is not None and layers not in facts else [])],
        fix=partition(s, after) if after else ["give that stage fewer layers"],
        gain=Gain("it starts, and the slowest stage no longer sets the pace"),
        verify="memory in use per GPU after loading: even, within a layer's worth",
        precedent="sglang#9798",
        is_at_start=True,
    )


def _out_of_memory(s: Situation) -> Finding | None:
    """Out of memory after it has served, on cards of which one stage's are much fuller than the others'."""
    mark = s.evidence.logs.marks.get("out-of-memory")
    used = [sum(gpu.memory_used_mib or 0.0 for gpu in stage) / len(stage) for stage in s.stages]
    if mark is None or len(used) < 2 or min(used) <= 0 or _cards_differ(s):
        return None
    full = used.index(max(used))
    others = (sum(used) - used[full]) / (len(used) - 1)
    total = s.stages[full][0].memory_total_mib
    if used[full] < _UNEVEN_MEMORY * others or (total and used[full] < _NO_MEMORY_LEFT * total):
        return None
    text = f"GPUs of stage {full} have {show(used[full] / 1024)} GiB in use, the others {show(others / 1024)} GiB"
    layers = total_layers(s)
    return Finding(
        "imbalance",
        0.8,
        f"One stage runs out of memory while the others have room: stage {full} "
        f"(PP{full}{', the last stage' if full == len(used) - 1 else ''}) holds more of the model, or of its caches.",
        evidence=[mark.fact(), Fact(text, used[full], s.stages[full][0].where), *([layers] if layers else [])],
        fix=[
            *partition(s, _one_layer_less(s, full)),
            "or a lower --gpu-memory-utilization / --mem-fraction-static, which leaves the fullest stage a reserve",
        ],
        gain=Gain("it keeps running; room for more requests at once"),
        verify="memory in use per GPU under load: even, within a layer's worth",
        precedent="vllm#12895, vllm#14763",
        unexplained="what fills that stage: layers, the head, or buffers that grow with the load",
    )


def _one_layer_less(s: Situation, full: int) -> list[int]:
    """The present split with a layer moved from the full stage to the one with the fewest."""
    layers = stage_layers(s)
    if layers is None or layers.value[full] < 2:
        return []
    after = [int(n) for n in layers.value]
    least = min((n for n in range(len(after)) if n != full), key=lambda n: after[n])
    after[full], after[least] = after[full] - 1, after[least] + 1
    return after


def _older_default(s: Situation, line: str) -> Fact | None:
    """The last stage runs out of memory: with the split of older releases it holds the whole remainder."""
    total = total_layers(s)
    if total is None or s.P is None or total.number < s.P or s.engine not in ("sglang", "vllm"):
        return None
    if not re.search(rf"PP_?{s.P - 1}\b", line):
        return None
    layers = old_default_partition(int(total.number), s.P)
    text = (
        f"layers per stage {','.join(str(n) for n in layers)} (older releases of {s.engine}: the remainder on the last)"
    )
    return Fact(text, layers, total.source)


def _others_spin(s: Situation, slow: int) -> bool:
    return any(is_low_power(gpu) for n, stage in enumerate(s.stages) if n != slow for gpu in stage)


def _rebalanced(s: Situation, shares: list[float], layers: Fact | None) -> tuple[list[int], Gain]:
    """Layers per stage with equal times, from each stage's present time per layer."""
    largest, mean = max(shares), sum(shares) / len(shares)
    bound = Gain(f"at most {show(largest / mean)} × tokens/s (perfect balance)", 1.0, largest / mean)
    total = total_layers(s)
    if layers is None and total is not None and _cards_differ(s):
        speeds = [min(card.bandwidth_gb_s for gpu in stage if (card := device_named(gpu.name))) for stage in s.stages]
        return weighted_partition(int(total.number), speeds), bound
    if layers is None or sum(layers.value) < len(shares):
        return [], bound
    per_layer = [share / count for share, count in zip(shares, layers.value, strict=True)]
    if _cards_differ(s):
        after = weighted_partition(sum(layers.value), [1 / cost for cost in per_layer])
        times = [count * cost for count, cost in zip(after, per_layer, strict=True)]
    else:
        if max(per_layer) < _SAME_COST * min(per_layer):  # the difference is noise
            per_layer = [sum(shares) / sum(layers.value)] * len(shares)
        costs = [cost for cost, count in zip(per_layer, layers.value, strict=True) for _ in range(count)]
        after = balanced_partition(costs, len(shares))
        times = stage_costs(costs, after)
    factor = largest / max(times)
    simulated = _simulated(s, shares, times)
    gain = Gain(
        f"{show(1 + (factor - 1) * 0.7)} to {show(factor)} × tokens/s with {','.join(str(n) for n in after)}"
        + (f"; {show(simulated)} × in a simulation of these stages" if simulated is not None else ""),
        1 + (factor - 1) * 0.7,
        factor,
        assumes="a layer costs what its stage's time divided by its layers says (the head counted with the last "
        "stage's), and requests keep every stage supplied",
    )
    return after, gain


def _simulated(s: Situation, before: list[float], after: list[float]) -> float | None:
    """The requests at hand on stages with the present and the new times."""
    if s.load.known is None:
        return None
    size = max(round(s.load.micro_batch.number), 1) if s.load.micro_batch is not None else None
    engine = "sglang" if s.engine == "sglang" and size is not None else None
    run = Run(lambda requests: 0.01, before, s.load.known, engine, max_micro_batch=size)
    return simulated_factor(run, run.changed(stage_factors=after))


def _cards_differ(s: Situation) -> bool:
    names = {gpu.name for stage in s.stages for gpu in stage if gpu.name}
    return len(names) > 1 and all(device_named(name) is not None for name in names)


def _gpu_names(s: Situation, stage: int) -> str:
    return f", {s.stages[stage][0].label}" if s.stages and len(s.stages[stage]) == 1 else ""


def _others(shares: list[float], slow: int) -> str:
    others = [share for n, share in enumerate(shares) if n != slow]
    low, high = min(others), max(others)
    return f"{low:.0%}" if high - low < 0.01 else f"{low:.0%} to {high:.0%}"
