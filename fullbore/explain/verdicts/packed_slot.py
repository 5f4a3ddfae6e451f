"""packed-slot: enough requests, but in fewer micro-batches than stages.

SGLang admits a burst into the first free slot and keeps it there; vLLM's --max-num-seqs limits all running requests, so
that they fit into one batch (vllm#28270, vllm#27462).
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from fullbore.explain.facts import Fact, first, show
from fullbore.explain.fixes import spread_over_micro_batches
from fullbore.explain.gains import Run, linear_between, simulated_factor
from fullbore.explain.situation import Situation
from fullbore.explain.verdicts.finding import Finding, Gain

_ALWAYS_ONE = 0.85  # less: at times nobody works, which packing alone does not explain
_PACKED = 0.75  # of the micro-batches that are possible
_ONE_AT_A_TIME = (0.7, 1.45)  # stages at work at once when one micro-batch travels
_FLAT = 1.1  # throughput that grows by less than this with twice the clients
_SLOWER_STEP = 1.3
_SATURATED = 0.85


class _Occupied(NamedTuple):
    """Micro-batches in flight, how sure, and why."""

    micro_batches: float
    strength: float
    facts: list[Fact]


def packed_slot(s: Situation) -> Finding | None:
    stages = s.P
    if stages is None or stages < 2 or s.progress.is_frozen:
        return None
    requests = _requests(s)
    if requests is None or requests.number < 2:
        return None
    possible = min(stages, round(requests.number))
    occupied = _from_log(s) or _from_trace(s) or _from_utilisation(s, possible) or _from_steps(s)
    if occupied is None or occupied.micro_batches > _PACKED * possible:
        return None
    if _is_contradicted(s, possible, occupied):
        return None
    count = max(round(occupied.micro_batches), 1)
    finding = Finding(
        "packed-slot",
        occupied.strength,
        f"{show(requests.value)} requests travel in about {count} micro-batch{'es' if count > 1 else ''} where "
        f"{stages} stages could each hold one: {count} of {stages} stages work at a time, {count / stages:.0%} of the "
        f"pipeline ({show(count / stages)}).",
        evidence=_unique([requests, *occupied.facts, s.pp, *_limits(s), *(s.busy.facts if s.busy else [])]),
        fix=spread_over_micro_batches(s, round(requests.number)),
        gain=_gain(s, round(requests.number), count, stages),
        verify="after the change, requests in flight ÷ requests in one micro-batch should be at least the number "
        "of stages, and every stage busier",
        precedent="vllm#28270, vllm#27462; SGLang: no code balances slots",
    )
    if s.load.slots is None and s.timeline is None:
        finding.unexplained = "how many requests are in each micro-batch is inferred, not seen"
    return finding


def _requests(s: Situation) -> Fact | None:
    if s.load.in_flight is not None:
        return s.load.in_flight
    if s.timeline is not None and s.timeline.batch_size is not None:
        size = s.timeline.batch_size
        return Fact(f"batches of {show(size)} requests in the traces", size, s.evidence.traces[0].source)
    bursts = [r.burst_into_empty_slot for r in s.evidence.logs.sglang.ranks.values() if r.burst_into_empty_slot]
    if bursts and bursts[0].value >= 2:
        return bursts[0].fact(f"{bursts[0].value} requests admitted into one empty slot at once")
    return None


def _from_log(s: Situation) -> _Occupied | None:
    """#running-req counts one micro-batch: requests in flight ÷ #running-req = slots in use."""
    if s.load.slots is not None and s.load.micro_batch is not None:
        facts = [s.load.micro_batch, *_burst(s)]
        return _Occupied(max(s.load.slots, 1.0), 0.85, facts)
    if s.load.in_flight is None and s.load.micro_batch is not None and _burst(s):
        size = s.load.micro_batch.number
        log = s.evidence.logs.sglang.ranks.values()
        burst = max(rank.burst_into_empty_slot.value for rank in log if rank.burst_into_empty_slot)
        if burst >= 2 and size >= 0.8 * burst:
            return _Occupied(1.0, 0.6, [s.load.micro_batch, *_burst(s)])
    return None


def _burst(s: Situation) -> list[Fact]:
    ranks = s.evidence.logs.sglang.ranks.values()
    found = [
        rank.burst_into_empty_slot
        for rank in ranks
        if rank.burst_into_empty_slot and rank.burst_into_empty_slot.value > 1
    ]
    return [found[0].fact(f"#new-seq: {found[0].value} admitted into one empty slot")] if found else []


def _from_trace(s: Situation) -> _Occupied | None:
    timeline = s.timeline
    if timeline is None or not timeline.is_complete or not timeline.concurrent_mean:
        return None
    if timeline.nobody > 0.3:
        return None  # most of the time is lost elsewhere
    facts = [
        Fact(
            f"traces of all {timeline.num_stages} ranks: {show(timeline.concurrent_mean)} stages compute at once on "
            f"average, at most {timeline.concurrent_max}; receives that wait are not counted as work, whether they "
            "spin or block",
            timeline.concurrent_mean,
            s.evidence.traces[0].source,
        )
    ]
    return _Occupied(max(timeline.concurrent_mean, 1.0), 0.9, facts)


def _from_utilisation(s: Situation, possible: int) -> _Occupied | None:
    """Utilisations that add up to one stage: one at a time. Nothing inflates idleness."""
    busy = s.busy
    if busy is None or not busy.is_trusted or possible < 2 or s.load.prefill_side is not None:
        return None
    low, high = _ONE_AT_A_TIME
    if not low <= busy.total <= min(high, _PACKED * possible) or busy.spread > 1.5:
        return None
    fact = Fact(f"the utilisations of all stages add up to {show(busy.total)} stages: one works at a time")
    strength, facts = 0.6 if busy.total >= _ALWAYS_ONE else 0.45, [fact]
    flat = _flat_throughput(s)
    if flat is not None:
        strength, facts = strength + 0.2, [fact, flat]
    if s.load.at_most is not None and s.load.known is not None and s.load.at_most.number <= s.load.known:
        strength += 0.05
    return _Occupied(1.0, strength, facts)


def _flat_throughput(s: Situation) -> Fact | None:
    """More clients, the same tokens/s: whatever limits is not the number of clients."""
    rows = sorted((r for r in s.evidence.bench if r.concurrency and r.output_tok_s), key=lambda r: r.concurrency or 0)
    if len(rows) < 2 or (rows[-1].concurrency or 0) < 2 * (rows[0].concurrency or 1):
        return None
    few, many = rows[0], rows[-1]
    if (few.concurrency or 0) < 2 or (many.output_tok_s or 0) > _FLAT * (few.output_tok_s or 0):
        return None
    text = (
        f"{show(few.output_tok_s)} tokens/s at concurrency {few.concurrency}, {show(many.output_tok_s)} at "
        f"{many.concurrency}: more clients only wait longer"
    )
    return Fact(text, None, many.source)


def _from_steps(s: Situation) -> _Occupied | None:
    """C ≤ P requests spread over slots step as fast as one alone; in one micro-batch they step as slowly as it does."""
    lone, step, count = s.speed.lone_ms, s.speed.step_ms, s.load.known
    if lone is None or step is None or count is None or s.P is None or not 2 <= count <= s.P:
        return None
    slower = step.number / lone.number
    if slower < _SLOWER_STEP or (s.busy is not None and s.busy.is_trusted and s.busy.total > 0.5 * min(s.P, count)):
        return None
    text = (
        f"a step takes {show(step.value)} ms with {count} requests and {show(lone.value)} ms with one ({show(slower)} "
        f"×): {count} requests on {count} stages of their own would step as fast as one"
    )
    facts = [Fact(text, slower, step.source)]
    cap = default_cap(s)
    if cap is not None and cap.number < count:
        return None
    return _Occupied(1.0, 0.55 if s.busy is None else 0.65, facts + ([cap] if cap else []))


def default_cap(s: Situation) -> Fact | None:
    """SGLang's limit on one micro-batch: resolved, or max(max_running_requests // pp_size, 1)."""
    cap = s.settings.number("micro_batch_cap")
    if cap is not None or s.engine != "sglang" or s.P is None:
        return cap
    limit = s.settings.number("max_running")
    if limit is None:
        return None
    resolved = max(int(limit.number) // s.P, 1)
    return Fact(f"pp_max_micro_batch_size {resolved} by default ({limit.text} // {s.P} stages)", resolved, limit.source)


def _limits(s: Situation) -> list[Fact]:
    return [fact for fact in (default_cap(s), s.settings.number("max_running"), s.load.waiting) if fact is not None]


def _is_contradicted(s: Situation, possible: int, occupied: _Occupied) -> bool:
    """Stages that are seen to work at once cannot all be waiting for one micro-batch."""
    busy = s.busy
    if busy is None or not busy.is_trusted:
        return False
    if max(busy.shares) >= _SATURATED and busy.kind != "account":
        return True  # a stage that always has work does not lack micro-batches
    return s.timeline is None and busy.total > max(_PACKED * possible, occupied.micro_batches * 1.6)


def _gain(s: Situation, requests: int, count: int, stages: int) -> Gain:
    possible = min(stages, requests)
    lone, step = s.speed.lone_ms, s.speed.step_ms
    if lone is not None and step is not None and step.number > lone.number and requests > 1 and count == 1:
        size = ceil(requests / possible)
        after = lone.number + (step.number - lone.number) * (size - 1) / (requests - 1)
        factor = step.number / after
        simulated = _simulated(s, requests, stages, size)
        least = min(1 + (factor - 1) / 2, simulated or factor)
        return Gain(
            f"{show(least)} to {show(factor)} × tokens/s at the same concurrency"
            + (f"; {show(simulated)} × in a simulation of these stages" if simulated is not None else ""),
            least,
            factor,
            assumes=f"equal stages whose time grows linearly from {show(lone.value)} ms (1 request) to "
            f"{show(step.value)} ms ({requests} requests) over all stages: max(Σ s({size}), {possible} · max "
            f"s({size})); depth plays no part in it",
        )
    high = possible / count
    return Gain(
        f"utilisation up to {show(high)} ×; tokens/s between 1 × (stages whose time does not depend on the batch: "
        f"then only more requests help) and {show(high)} × (time proportional to the batch)",
        1.0,
        high,
        assumes="how stage time depends on the batch is not in the evidence; a bench at concurrency 1 and at the "
        "present one tells",
    )


def _simulated(s: Situation, requests: int, stages: int, size: int) -> float | None:
    """The same requests in one micro-batch and spread, on stages with the measured times."""
    if s.speed.lone_ms is None or s.speed.step_ms is None:
        return None
    decode_s = linear_between((1, s.speed.lone_ms.number / 1000), (requests, s.speed.step_ms.number / 1000), stages)
    if s.engine == "sglang":
        packed = Run(decode_s, [1.0] * stages, requests, "sglang", max_micro_batch=requests)
        return simulated_factor(packed, packed.changed(max_micro_batch=size))
    packed = Run(decode_s, [1.0] * stages, requests, micro_batches=1)
    return simulated_factor(packed, packed.changed(micro_batches=None))


def _unique(facts: list[Fact | None]) -> list[Fact]:
    seen: dict[str, Fact] = {}
    for fact in facts:
        if first([fact]) is not None and fact is not None:
            seen.setdefault(fact.text, fact)
    return list(seen.values())
