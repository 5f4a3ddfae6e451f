"""One possible cause, weighed."""

from __future__ import annotations

from dataclasses import dataclass, field

from fullbore.explain.facts import Fact

# Verdict ids; the last three are no faults.
IDS = (
    "few-requests",
    "packed-slot",
    "ring-order",
    "imbalance",
    "launch-bound",
    "chunks-serialised",
    "control-plane-latency",
    "slow-link",
    "spin-deadlock",
    "stage-divergence",
    "kv-limited",
    "not-idle-time",
    "clock-throttle",
    "at-roofline",
    "pp-latency-expected",
    "insufficient-evidence",
)
NOTHING_WRONG = ("at-roofline", "pp-latency-expected")
REPORTED = 0.5  # findings weaker than this are hypotheses, not verdicts


@dataclass(frozen=True)
class Gain:
    """What the fix would bring. `low` and `high` are factors of `what`; None where no number can be given."""

    text: str
    low: float | None = None
    high: float | None = None
    what: str = "tokens/s"
    assumes: str = ""


@dataclass
class Finding:
    """`strength`: 0 to 1, how well the evidence supports it. `summary`: one or two sentences."""

    id: str
    strength: float
    summary: str
    evidence: list[Fact] = field(default_factory=list)
    against: list[Fact] = field(default_factory=list)
    unexplained: str = ""
    fix: list[str] = field(default_factory=list)
    gain: Gain = field(default_factory=lambda: Gain("none to expect: nothing is wrong"))
    verify: str = ""
    precedent: str = ""  # where the mechanism is publicly described
    proof: list[Fact] = field(default_factory=list)  # lines of the engine's source that the fix rests on
    is_at_start: bool = False  # the engine never came to serve

    @property
    def confidence(self) -> str:
        return confidence(self.strength)


def confidence(strength: float) -> str:
    """In words."""
    for least, word in ((0.9, "near certain"), (0.75, "very likely"), (REPORTED, "likely")):
        if strength >= least:
            return word
    return "possible"
