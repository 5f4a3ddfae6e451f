"""Evidence in, answer out: the whole of `fullbore explain` as one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullbore.explain.evidence import read_evidence
from fullbore.explain.report.answer import answer
from fullbore.explain.situation import Situation, understand
from fullbore.explain.verdicts import NOTHING_WRONG, judge

NOTHING_TO_FIX, SOMETHING_TO_FIX, NOT_ENOUGH_EVIDENCE, UNREADABLE = 0, 1, 3, 4


@dataclass
class Explanation:
    """`answer`: plain data, secrets masked. `exit_code`: 0 nothing wrong, 1 to fix, 3 not enough, 4 unreadable."""

    situation: Situation
    answer: dict[str, Any]

    @property
    def exit_code(self) -> int:
        if not self.situation.evidence.is_readable:
            return UNREADABLE
        primary = self.answer["primary"]
        if primary == "insufficient-evidence":
            return NOT_ENOUGH_EVIDENCE
        return NOTHING_TO_FIX if primary in NOTHING_WRONG else SOMETHING_TO_FIX


def explain(paths: list[Path], on_file: Callable[[str], None] | None = None) -> Explanation:
    """Reads evidence and judges it.

    Args:
        paths: files or folders.
        on_file: told each file's name before it is read.
    """
    situation = understand(read_evidence(paths, on_file))
    return Explanation(situation, answer(situation, judge(situation)))
