"""few-requests: C requests keep at most C of P stages busy, however they are scheduled (ollama#11917, vllm#9645)."""

from __future__ import annotations

from fullbore.explain.facts import Fact, show
from fullbore.explain.fixes import faster_lone_request, more_requests
from fullbore.explain.situation import Situation
from fullbore.explain.verdicts.finding import Finding, Gain

_MORE_THAN_POSSIBLE = 1.5  # stages at work per request; sampling overlaps neighbouring stages
_MOSTLY_THERE = 0.6
_MORE_THAN_ONE = 1.3
_USUAL_CHUNK = 8192  # tokens of a prompt that engines read at once, where the setting is not known


def few_requests(s: Situation) -> Finding | None:
    stages, most = s.P, s.load.most
    if stages is not None and most is None and not s.progress.is_frozen:
        return _one_at_a_time(s, stages)
    if stages is None or stages < 2 or most is None or most >= stages or s.progress.is_frozen:
        return None
    count = s.load.in_flight or s.load.at_most
    if count is None or s.pp is None or _chunks_can_follow(s):
        return None
    finding = Finding(
        "few-requests",
        0.6,
        f"{most} request{'s' if most > 1 else ''} in flight on {stages} stages: each stage can be busy at most "
        f"{most / stages:.0%} of the time ({most}/{stages}), because a request is on one stage at a time.",
        evidence=[count, s.pp],
        fix=more_requests(s, most) + (faster_lone_request(s) if most == 1 else []),
        gain=_gain(s, most, stages),
        verify=f"with {stages} or more requests at once, utilisation of every stage should rise towards 100 % and "
        "tokens/s in proportion, each request as fast as now",
        precedent="ollama#11917, vllm#9645",
    )
    if _is_held_back(s):
        finding.strength, waiting = 0.45, s.load.waiting
        finding.against.append(Fact(f"{waiting}: it is not for lack of requests that no more run"))
        return finding
    if s.load.in_flight is None:
        finding.summary += (
            " (That many are the most that the settings admit; how many there were is not in the evidence.)"
        )
    return _weigh_busy(s, finding, most)


def _one_at_a_time(s: Situation, stages: int) -> Finding | None:
    """The stages' work adds up to one stage's, and nothing says how many requests there were: a hypothesis."""
    busy = s.busy
    if stages < 2 or busy is None or not busy.is_trusted or not 0.7 <= busy.total <= _MORE_THAN_ONE:
        return None
    return Finding(
        "few-requests",
        0.4,
        f"the stages' work adds up to {show(busy.total)} stages: one micro-batch travels at a time, which is what a "
        "lone request does (few-requests), or many that are all in one micro-batch (packed-slot). How many were "
        "running tells.",
        evidence=busy.facts,
        fix=more_requests(s, 1),
    )


def _chunks_can_follow(s: Situation) -> bool:
    """Chunks of one prompt can be on several stages at once: then prompts, not requests, have to be many."""
    prompt, chunk = s.load.input_tokens, s.settings.number("chunk")
    if not s.load.is_prefill_bound or prompt is None:
        return False
    return prompt.number >= 2 * (chunk.number if chunk is not None and chunk.number > 0 else _USUAL_CHUNK)


def _is_held_back(s: Situation) -> bool:
    """Requests wait although the limit on those that run is not reached."""
    waits = s.load.waiting is not None and s.load.waiting.number > 0
    limit, running = s.load.at_most, s.load.known
    return waits and running is not None and s.engine != "sglang" and (limit is None or running < limit.number)


def _weigh_busy(s: Situation, finding: Finding, most: int) -> Finding | None:
    """Is what the stages do what so few requests would make them do?"""
    busy = s.busy
    if busy is None:
        finding.unexplained = "how busy the stages are (no samples under load)"
        return finding
    finding.evidence += busy.facts
    if not busy.is_trusted:
        finding.against.append(Fact("utilisation is high while power is low: receives that spin, no sign of work"))
        return finding
    at_work = busy.total
    fact = Fact(
        f"stages at work at once, on average: {show(at_work)}; {most} request{'s' if most > 1 else ''} can occupy "
        f"{most}"
    )
    if at_work > most * _MORE_THAN_POSSIBLE:
        return None  # more stages work than requests exist: the count must be of another moment
    if at_work < most * _MOSTLY_THERE:
        finding.strength = 0.5
        finding.against.append(fact)
        finding.unexplained = (
            f"for {1 - at_work / most:.0%} of the time no stage works although a request is there: host, links or "
            "launches"
        )
        return finding
    finding.strength = 0.85
    finding.evidence.append(fact)
    if busy.spread > 1.3:
        finding.unexplained = (
            "the stages differ; with so few requests that costs nothing, only the sum of their times counts"
        )
    return finding


def _gain(s: Situation, most: int, stages: int) -> Gain:
    high = stages / most
    if s.busy is not None and s.busy.is_trusted and s.busy.total > 0:
        high = min(high, 1 / max(max(s.busy.shares), 0.01)) if most == 1 else high
    return Gain(
        f"up to {show(high)} × tokens/s of all requests together with {stages} in flight; none for one request by "
        "itself",
        1.0,
        high,
        assumes="every stage takes as long for a micro-batch of the new requests as for the present one",
    )
