"""Evidence in, answer out: the whole of `fullbore explain` as one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullbore.explain.evidence import read_evidence
from fullbore.explain.proof import add_proof
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


def explain(paths: list[Path], on_file: Callable[[str], None] | None = None, package: str | None = None) -> Explanation:
    """Reads evidence and judges it.

    Args:
        paths: files or folders.
        on_file: told each file's name before it is read.
        package: name or path of the engine's package, whose lines are cited as proof; None: if it is installed.

    Raises:
        SourceError: `package` cannot be read.
    """
    situation = understand(read_evidence(paths, on_file))
    judgement = judge(situation)
    add_proof(situation, judgement, package)
    return Explanation(situation, answer(situation, judgement))
