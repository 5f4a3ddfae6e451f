"""Verdicts: one file per family, each a rule from a situation to a finding, and `judge`, which weighs them."""

from fullbore.explain.verdicts.finding import IDS, NOTHING_WRONG, Finding, Gain
from fullbore.explain.verdicts.judge import Judgement, judge

__all__ = ["IDS", "NOTHING_WRONG", "Finding", "Gain", "Judgement", "judge"]
