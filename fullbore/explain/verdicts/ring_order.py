"""ring-order: results are exchanged before the launch with nothing to spare, so that at most P - 1 of P stages work.

A stage then waits for the last stage's result of the previous round before it launches: the period is Σ s / (P - 1) and
every stage is busy at most (P - 1) / P, whatever the load, the split or the graphs. SGLang does it with speculative
decoding at pp_async_batch_depth 0 (sglang#40499).
"""

from __future__ import annotations

from fullbore.explain.busy import Busy, period_ms, stage_times_ms
from fullbore.explain.facts import Fact, Source, show
from fullbore.explain.physics import ring_cap, ring_period
from fullbore.explain.situation import Situation
from fullbore.explain.verdicts.finding import Finding, Gain
from fullbore.plan.comparison import exchange_first_ring

_EVEN = 1.08
_NEAR_CAP = 0.06
_TOLD_APART = 1.1  # a measured period over what the slowest stage allows
_PERIOD_SLACK = (0.97, 1.18)  # measured over predicted: CPU work comes on top


def ring_order(s: Situation) -> Finding | None:
    stages, busy = s.P, s.busy
    if stages is None or stages < 2 or busy is None or not busy.is_trusted or s.progress.is_frozen:
        return None
    if not _has_enough_requests(s):
        return None
    if busy.spread > _EVEN:
        return _uneven(s, busy)
    cap = ring_cap(stages)
    mean = busy.total / stages
    if not cap - max(_NEAR_CAP, 0.15 * cap if busy.kind != "utilisation" else 0) <= mean <= cap + _NEAR_CAP / 2:
        return None
    order = _exchanges_first(s)
    period = _period(s)
    strength = 0.35 + 0.3 * (order is not None) + 0.3 * (period is not None)
    if busy.kind in ("trace", "stage times") and order is not None:
        strength = max(strength, 0.8)
    finding = Finding(
        "ring-order",
        min(strength, 0.95),
        f"All {stages} stages are equally busy and none above {cap:.0%}: the mark of a ring that exchanges results "
        f"before it launches, which caps every stage at (P - 1)/P = {stages - 1}/{stages}, whatever the load.",
        evidence=[*busy.facts, *([order] if order else []), *([period] if period else [])],
        fix=_fix(s),
        gain=Gain(
            f"{show(_simulated(busy.shares))} × tokens/s in a simulation of both orders, up to {show(1 / mean)} × "
            f"(from {mean:.0%} busy towards 100 %)",
            min(_simulated(busy.shares), 1 / mean),
            1 / mean,
            assumes="requests keep waiting, and launching one micro-batch ahead hides the exchange and the host's work",
        ),
        verify=f"the step period should fall from Σ s/(P - 1) towards Σ s/P, and every stage rise above {cap:.0%}",
        precedent="sglang#40499",
    )
    waiting = s.load.waiting
    if waiting is not None and waiting.number > 0:
        finding.evidence.append(Fact(f"{waiting.text}: it is not for lack of requests", waiting.value, waiting.source))
    if order is None:
        finding.against.append(Fact("no setting in the evidence that makes this engine exchange results first"))
    if period is None:
        finding.unexplained = "the stages' own times and the step period are not in the evidence"
    return finding


def _uneven(s: Situation, busy: Busy) -> Finding | None:
    """Stages that differ hide the mark; their own times and the period still tell the two orders apart."""
    period, known = _period(s), _times(s)
    if period is None or known is None:
        return None
    stage_ms, measured_ms, _, _ = known
    launched_first_ms = exchange_first_ring(stage_ms, len(stage_ms) + 1).period_s
    if measured_ms < _TOLD_APART * launched_first_ms:
        return None  # the slowest stage explains the period as well
    order = _exchanges_first(s)
    factor = measured_ms / launched_first_ms
    return Finding(
        "ring-order",
        0.6 + 0.25 * (order is not None),
        f"The period of {show(measured_ms)} ms is that of a ring that exchanges results before it launches; the "
        f"slowest stage alone would allow {show(launched_first_ms)} ms.",
        evidence=[*busy.facts, *([order] if order else []), period],
        against=[] if order else [Fact("no setting in the evidence that makes this engine exchange results first")],
        fix=_fix(s),
        gain=Gain(
            f"up to {show(factor)} × tokens/s, down to the slowest stage's period; a better split comes after that",
            1.0,
            factor,
            assumes="requests keep waiting, and launching one micro-batch ahead hides the exchange and the host's work",
        ),
        verify=f"the step period should fall towards {show(launched_first_ms)} ms",
        precedent="sglang#40499",
    )


def _has_enough_requests(s: Situation) -> bool:
    if s.is_saturated:
        return True
    return s.load.slots is not None and s.P is not None and s.load.slots >= s.P


def _exchanges_first(s: Situation) -> Fact | None:
    """SGLang with speculation and no depth."""
    speculative = s.settings.fact("speculative")
    depth = s.settings.number("depth")
    if s.engine not in ("sglang", None) or speculative is None or (depth is not None and depth.number > 0):
        return None
    at_depth = depth.text if depth is not None else "pp_async_batch_depth 0 (default)"
    text = f"{speculative.text} with pipeline stages at {at_depth}: results are exchanged before the launch"
    return Fact(text, None, speculative.source)


def _times(s: Situation) -> tuple[list[float], float, Source | None, str] | None:
    """Each stage's milliseconds, the measured period, and where they are from."""
    times, measured = stage_times_ms(s.evidence, s.P), period_ms(s.evidence)
    if times is not None and measured is not None:
        return times.value, measured.number, times.source, measured.text
    if s.timeline is not None and s.timeline.is_complete and s.timeline.period_us:
        period = s.timeline.period_us / 1000
        source = s.evidence.traces[0].source
        return [us / 1000 for us in s.timeline.stage_us], period, source, f"{show(period)} ms in the traces"
    return None


def _period(s: Situation) -> Fact | None:
    """Σ s / (P - 1) beside the measured period."""
    known = _times(s)
    if known is None or min(known[0]) <= 0:
        return None
    stage_ms, period, source, text = known
    predicted = ring_period(stage_ms)
    if not _PERIOD_SLACK[0] <= period / predicted <= _PERIOD_SLACK[1]:
        return None
    busy_period = sum(stage_ms) / len(stage_ms)
    return Fact(
        f"predicted period Σ s/(P - 1) = {show(predicted)} ms, measured {show(period)} ms ({text}); a full pipeline "
        f"would take {show(busy_period)} ms",
        predicted,
        source,
    )


def _simulated(stage_times: list[float]) -> float:
    """Period of the exchange-first ring over that of the same ring with one more micro-batch in flight."""
    slots = len(stage_times)
    return exchange_first_ring(stage_times, slots).period_s / exchange_first_ring(stage_times, slots + 1).period_s


def _fix(s: Situation) -> list[str]:
    if s.engine == "sglang":
        return [
            "--pp-async-batch-depth 1   (one more micro-batch in flight: the exchange no longer holds up the launch)",
            "or a release with sglang#40499, which launches prefill micro-batches before the exchange",
            "or leave speculative decoding off: without it SGLang launches first",
        ]
    return ["launch the next micro-batch before waiting for the results of the last, or allow one more in flight"]
