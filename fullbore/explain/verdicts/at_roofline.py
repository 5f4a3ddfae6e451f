"""at-roofline (nothing is wrong): the step takes about as long as its memory traffic has to, or every stage is full.

One request: bytes of its weights / memory bandwidth, whatever P. A full pipeline: m micro-batches pass the slowest
stage one after the other. Engines reach 60 to 90 % of a data sheet's bandwidth (dgx-spark-playbooks#91: 60-62 %).
"""

from __future__ import annotations

from fullbore.explain.busy import is_low_power
from fullbore.explain.facts import Fact, show
from fullbore.explain.situation import Situation
from fullbore.explain.verdicts.finding import Finding

_NEAR = 0.55
_FULL = 0.85
_TFLOPS_NEAR = 0.4
_MOSTLY_EXCHANGES = 0.35  # of a stage's work in traces: busy, but not computing


def at_roofline(s: Situation) -> Finding | None:
    if s.progress.is_frozen or s.is_cpu:
        return None
    return _lone(s) or _full_pipeline(s) or _computing(s)


def _lone(s: Situation) -> Finding | None:
    """One request on one stage: nothing to pipeline, and the weights are read as fast as they can be."""
    share, floor = s.speed.lone_share, s.speed.lone_floor_ms
    if share is None or floor is None or share < _NEAR or s.P != 1 or s.load.known not in (1, None):
        return None
    if share > 1.3:
        return None  # faster than physics: the sizes are wrong
    facts = [f for f in (s.speed.lone_ms, s.speed.bytes_per_token, s.speed.bandwidth_bytes_s) if f is not None]
    facts.append(
        Fact(
            f"roofline {show(1000 / floor)} tokens/s ({show(floor)} ms per token); reached {share:.0%} of it",
            1000 / floor,
        )
    )
    return Finding(
        "at-roofline",
        0.9 if share >= 0.65 else 0.8,
        f"Nothing is wrong: one request reads all weights for every token, which allows {show(1000 / floor)} tokens/s "
        f"at most on this memory; {show(1000 / (s.speed.lone_ms.number if s.speed.lone_ms else floor))} is "
        f"{share:.0%} of that, what engines reach.",
        evidence=facts + _utilisation(s),
        fix=[
            "for a faster single request: fewer bytes per token (smaller quantisation, a mixture of experts), "
            "speculative decoding, or tensor parallelism over more memory; for more tokens/s in all: more requests "
            "at once",
        ],
        verify="tokens/s × bytes per token against the card's bandwidth",
        precedent="dgx-spark-playbooks#91",
    )


def _full_pipeline(s: Situation) -> Finding | None:
    """Every stage is busy, and works while it is busy."""
    stages, busy = s.P, s.busy
    if stages is None or busy is None or (stages > 1 and (s.load.known is None or s.load.known < stages)):
        return None
    if min(busy.shares) < _FULL or not busy.is_trusted or _any_cool(s):
        return None
    if s.load.slots is not None and s.load.slots < 0.75 * stages:
        return None
    if s.timeline is not None and s.timeline.exchange_share_most >= _MOSTLY_EXCHANGES:
        return None
    step = _cycle_share(s)
    has_power = any(gpu.load.power_w for gpu in s.gpus)
    if busy.kind == "utilisation" and not has_power and step is None and _scaling(s) is None:
        return None  # utilisation alone is never proof
    if step is not None and step.number < 0.3:
        return None  # busy, but far from what memory allows: not a healthy run
    facts = [
        *busy.facts,
        *([s.load.in_flight] if s.load.in_flight else []),
        *([s.load.micro_batch] if s.load.micro_batch else []),
    ]
    scaling = _scaling(s)
    facts += [fact for fact in (step, scaling, _throughput(s)) if fact is not None]
    who = f"the pipeline is full, all {stages} stages are" if stages > 1 else "the one stage is"
    strength = 0.65 + 0.15 * (step is not None and step.number >= _NEAR) + 0.1 * (scaling is not None)
    return Finding(
        "at-roofline",
        strength,
        f"Nothing is wrong: {who} busy ({min(busy.shares):.0%} or more)"
        f"{', at the power of GPUs that work' if has_power else ''}; there is no bubble to remove.",
        evidence=facts,
        fix=[
            "no setting of the pipeline; more tokens/s need fewer bytes per token (quantisation), larger batches "
            "while latency allows it, or more GPUs"
        ],
        verify="the same figures at twice the concurrency: tokens/s should hardly change where steps get longer",
        precedent="",
    )


def _computing(s: Situation) -> Finding | None:
    """Prefill at a good share of the cards' arithmetic."""
    rows = [row for row in s.evidence.bench if row.input_tok_s]
    active = s.model.active_b
    if not rows or active is None or s.card is None or not s.load.is_prefill_bound or s.P is None:
        return None
    best = max(rows, key=lambda row: row.input_tok_s or 0)
    used = 2 * active * 1e9 * (best.input_tok_s or 0)
    share = used / (s.card.flops("bf16") * s.P * s.tp)
    if share < _TFLOPS_NEAR:
        return None
    fact = Fact(
        f"{show(best.input_tok_s)} input tokens/s use {share:.0%} of the cards' dense bf16 arithmetic",
        share,
        best.source,
    )
    return Finding(
        "at-roofline",
        0.7,
        f"Nothing is wrong: reading prompts uses {share:.0%} of the arithmetic that {s.P * s.tp} cards have.",
        evidence=[fact],
        fix=["nothing; faster prefill needs fewer operations (fp8, fp4, prefix cache) or more GPUs"],
        verify="input tokens/s × 2 × active parameters against the cards' data sheet",
    )


def _any_cool(s: Situation) -> bool:
    return any(is_low_power(gpu) is True for gpu in s.gpus if gpu.has_load)


def _cycle_share(s: Situation) -> Fact | None:
    """Least time of the cycle over the measured one: m micro-batches, one after the other, on the slowest stage."""
    step, stages = s.speed.step_ms, s.P or 1
    if step is None or s.load.known is None:
        return None
    size = s.load.micro_batch.number if s.load.micro_batch is not None else s.load.known / stages
    floor = s.speed.pass_floor_ms(size)
    if floor is None:
        return None
    batches = max(s.load.known / max(size, 1), 1.0)
    least = max(floor, batches * floor / stages)
    share = least / step.number
    if share > 1.3:
        return None
    return Fact(
        f"{step.text}; reading the weights allows {show(least)} ms: {share:.0%} of the roofline", share, step.source
    )


def _scaling(s: Situation) -> Fact | None:
    """Many requests step almost as fast as one."""
    lone, step = s.speed.lone_ms, s.speed.step_ms
    if lone is None or step is None or s.load.known is None or s.load.known < 2 or step.number > 1.5 * lone.number:
        return None
    return Fact(
        f"a step takes {show(step.value)} ms with {s.load.known} requests and {show(lone.value)} ms with one",
        None,
        step.source,
    )


def _throughput(s: Situation) -> Fact | None:
    return s.speed.tok_s


def _utilisation(s: Situation) -> list[Fact]:
    return s.busy.facts if s.busy is not None else []
