"""From findings to an answer: which is the primary verdict, what stands beside it, what is true but not the bottleneck.

Order of precedence: an engine that does not run; hardware that runs slowly and slowdowns that no idle time explains;
then whatever the evidence supports best. Verdicts that exclude each other are not given together: only co-causes of
`_TOGETHER` stand beside the primary one, everything else that is true is listed as not the bottleneck.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from fullbore.explain.facts import Fact
from fullbore.explain.situation import Situation
from fullbore.explain.verdicts.accounted import ACCOUNTED, accounted
from fullbore.explain.verdicts.at_roofline import at_roofline
from fullbore.explain.verdicts.chunks_serialised import chunks_serialised
from fullbore.explain.verdicts.clock_throttle import clock_throttle
from fullbore.explain.verdicts.control_plane_latency import control_plane_latency
from fullbore.explain.verdicts.experiments import from_experiments, refuted
from fullbore.explain.verdicts.few_requests import few_requests
from fullbore.explain.verdicts.finding import NOTHING_WRONG, REPORTED, Finding, Gain
from fullbore.explain.verdicts.imbalance import imbalance
from fullbore.explain.verdicts.kv_limited import kv_limited
from fullbore.explain.verdicts.launch_bound import launch_bound
from fullbore.explain.verdicts.missing import Missing, missing_evidence
from fullbore.explain.verdicts.not_idle_time import not_idle_time
from fullbore.explain.verdicts.packed_slot import packed_slot
from fullbore.explain.verdicts.pp_latency_expected import pp_latency_expected
from fullbore.explain.verdicts.ring_order import ring_order
from fullbore.explain.verdicts.slow_link import link_facts, slow_link
from fullbore.explain.verdicts.spin_deadlock import spin_deadlock
from fullbore.explain.verdicts.stage_divergence import stage_divergence

Rule = Callable[[Situation], Finding | None]

RULES: tuple[Rule, ...] = (
    kv_limited,
    stage_divergence,
    spin_deadlock,
    clock_throttle,
    not_idle_time,
    chunks_serialised,
    control_plane_latency,
    ring_order,
    imbalance,
    slow_link,
    launch_bound,
    packed_slot,
    few_requests,
    at_roofline,
    pp_latency_expected,
)

# Lower comes first whatever the strength.
_DOES_NOT_RUN, _RUNS_SLOWLY, _USUAL = 0, 1, 2
_TIERS = {"stage-divergence": _DOES_NOT_RUN, "spin-deadlock": _DOES_NOT_RUN}
_TIERS |= {"clock-throttle": _RUNS_SLOWLY, "not-idle-time": _RUNS_SLOWLY}

_ESTABLISHED = 0.65
_MIXED = 0.6  # where facts may be of different deployments

# Causes that do not come and go with the same settings and load: they do not explain that it was faster before.
_STATIC = {
    "few-requests",
    "packed-slot",
    "ring-order",
    "imbalance",
    "launch-bound",
    "at-roofline",
    "pp-latency-expected",
}

# Causes that act together, each with a fix of its own.
_TOGETHER = {
    frozenset({"launch-bound", "packed-slot"}),
    frozenset({"launch-bound", "few-requests"}),
    frozenset({"packed-slot", "few-requests"}),
    frozenset({"kv-limited", "imbalance"}),
}


@dataclass
class Judgement:
    """The answer. `aside`: true findings that are not the bottleneck; `hypotheses`: findings too weak to report."""

    verdicts: list[Finding]
    aside: list[Fact] = field(default_factory=list)
    hypotheses: list[Finding] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)

    @property
    def primary(self) -> Finding:
        return self.verdicts[0]


def judge(s: Situation) -> Judgement:
    """Weighs all rules on one situation."""
    findings = _merged([*_findings(s), *from_experiments(s)])
    for verdict, fact in refuted(s):
        for finding in findings:
            if finding.id == verdict:
                finding.against.append(fact)
                finding.strength -= 0.3
    if s.speed.was_faster is not None:
        for finding in findings:
            if finding.id in _STATIC:
                finding.strength -= 0.3
                finding.against.append(_was_the_same_before(s.speed.was_faster))
    if (mixed := _several_engines(s)) is not None:
        s.evidence.problems.append(mixed.text)
        for finding in findings:
            finding.strength = min(finding.strength, _MIXED)
            finding.against.append(mixed)
    findings.sort(key=lambda finding: (_tier(finding), -finding.strength))
    supported = [finding for finding in findings if finding.strength >= REPORTED]
    weak = [finding for finding in findings if finding.strength < REPORTED]
    missing = missing_evidence(s, is_running=not (supported and _does_not_start(supported[0])))
    aside = [*link_facts(s), *(fact for _, fact in refuted(s))]
    if not supported:
        return Judgement([_insufficient(s, missing, weak)], aside, weak, missing)
    primary, *others = supported
    verdicts = [primary]
    for other in others:
        if all(frozenset({other.id, verdict.id}) in _TOGETHER for verdict in verdicts):
            verdicts.append(other)
        else:
            aside.append(_aside(other, primary))
    if primary.id == "slow-link":
        aside = [fact for fact in aside if not fact.text.startswith("link:")]
    return Judgement(verdicts, aside, weak, missing)


def _several_engines(s: Situation) -> Fact | None:
    """Logs, metrics or settings of different engines: of two deployments, whose facts do not belong together."""
    evidence, logs = s.evidence, s.evidence.logs
    seen = {dump.engine for dump in evidence.metrics} | {info.engine for info in evidence.server_infos}
    seen |= {"sglang"} if logs.sglang.ranks else set()
    seen |= {"vllm"} if logs.vllm.gen_tok_s or logs.vllm.running else set()
    seen |= {"llama.cpp"} if logs.llama.decode_ms else set()
    seen |= {"fullbore"} if evidence.accounts else set()
    engines = sorted(engine for engine in seen if engine is not None)
    if len(engines) < 2:
        return None
    text = f"evidence of {' and '.join(engines)} together: if these are several deployments, explain each by itself"
    return Fact(text, len(engines))


def _was_the_same_before(was_faster: Fact) -> Fact:
    return Fact(f"{was_faster.text}: what has always been so does not explain a change", None, was_faster.source)


def _findings(s: Situation) -> Iterator[Finding]:
    """What the rules find. Where every stage-second is accounted for, other rules cannot say otherwise."""
    settled = _apply(accounted, s)
    if settled is not None:
        yield settled
    for rule in RULES:
        finding = _apply(rule, s)
        if finding is not None and (settled is None or finding.id == settled.id or finding.id not in ACCOUNTED):
            yield finding


def _apply(rule: Rule, s: Situation) -> Finding | None:
    try:
        return rule(s)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        # Evidence is anything that a user has: one rule that trips over it must not hide what the others see.
        s.evidence.problems.append(f"the rule {rule.__name__} failed on these values ({error!r}): please report it")
        return None


def _tier(finding: Finding) -> int:
    if finding.id == "not-idle-time" and finding.strength < _ESTABLISHED:
        return _USUAL  # what it is, another rule may know
    return _DOES_NOT_RUN if _does_not_start(finding) else _TIERS.get(finding.id, _USUAL)


def _does_not_start(finding: Finding) -> bool:
    return finding.is_at_start


def _merged(findings: Iterable[Finding]) -> list[Finding]:
    """One finding per verdict; an experiment joins the rule that says the same."""
    merged: dict[str, Finding] = {}
    for finding in findings:
        first = merged.get(finding.id)
        if first is None:
            merged[finding.id] = finding
            continue
        first.evidence += finding.evidence
        first.strength = min(max(first.strength, finding.strength) + 0.05, 0.98)
        if finding.gain.low is not None and finding.gain.low == finding.gain.high:  # measured, not predicted
            first.gain = finding.gain
        first.fix += [line for line in finding.fix if line not in first.fix]
    return list(merged.values())


def _aside(finding: Finding, primary: Finding) -> Fact:
    why = "no fault" if primary.id in NOTHING_WRONG else "but not what limits now"
    return Fact(f"{finding.id} ({finding.confidence}, {why}): {finding.summary}", finding.id)


def _insufficient(s: Situation, missing: list[Missing], weak: list[Finding]) -> Finding:
    hint = ""
    if weak:
        hint = (
            f" It could be {' or '.join(finding.id for finding in weak[:3])}, but the evidence would fit other causes "
            "as well."
        )
    seen = "" if s.has_load else " Nothing in it was taken under load, while serving requests."
    return Finding(
        "insufficient-evidence",
        1.0,
        f"The evidence does not say what limits this deployment.{seen}{hint}",
        evidence=[fact for fact in (s.engine_fact, s.pp, *(s.busy.facts if s.busy else [])) if fact is not None],
        fix=[f"{item.what}: {item.how}" for item in missing[:4]],
        gain=Gain("unknown until the cause is"),
        verify="run fullbore explain again with what is missing",
    )
