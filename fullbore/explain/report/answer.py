"""The whole answer as plain data: what --json prints, and what the other renderings are made from."""

from __future__ import annotations

from typing import Any

from fullbore.explain.facts import Fact
from fullbore.explain.report.overview import overview
from fullbore.explain.situation import Situation
from fullbore.explain.verdicts import Finding, Judgement

_SHOWN_EVIDENCE = 24


def answer(s: Situation, judgement: Judgement) -> dict[str, Any]:
    """Strings, numbers, lists and dicts, with every secret masked."""
    tree = {
        "primary": judgement.primary.id,
        "verdicts": [_verdict(finding) for finding in judgement.verdicts],
        "not_the_bottleneck": [_fact(fact) for fact in judgement.aside],
        "hypotheses": [{"id": f.id, "confidence": f.confidence, "summary": f.summary} for f in judgement.hypotheses],
        "missing": [{"what": item.what, "how": item.how} for item in judgement.missing],
        "facts": [_fact(fact) for fact in overview(s)],
        "recognised": [
            {"file": note.name, "kind": str(note.kind), "used": note.is_evidence, "remark": note.remark}
            for note in s.evidence.files
        ],
        "problems": list(s.evidence.problems),
    }
    return s.evidence.masker.mask_tree(tree)  # type: ignore[no-any-return]


def _verdict(finding: Finding) -> dict[str, Any]:
    gain = finding.gain
    return {
        "id": finding.id,
        "confidence": finding.confidence,
        "summary": finding.summary,
        "evidence": [_fact(fact) for fact in _unique(finding.evidence)[:_SHOWN_EVIDENCE]],
        "against": [_fact(fact) for fact in finding.against],
        "unexplained": finding.unexplained,
        "fix": list(finding.fix),
        "gain": {"text": gain.text, "low": gain.low, "high": gain.high, "what": gain.what, "assumes": gain.assumes},
        "proof": [_fact(fact) for fact in finding.proof],
        "verify": finding.verify,
        "source": finding.precedent,
    }


def _unique(facts: list[Fact]) -> list[Fact]:
    return list({fact.text: fact for fact in facts}.values())


def _fact(fact: Fact) -> dict[str, Any]:
    value = fact.value if isinstance(fact.value, int | float | str | bool) else None
    source = fact.source
    return {
        "text": fact.text,
        "value": value,
        "file": source.file if source is not None else None,
        "line": source.line if source is not None else None,
    }
