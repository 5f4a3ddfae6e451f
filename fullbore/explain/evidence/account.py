"""fullbore's own account of a recording: seconds per stage by cause (`fullbore account --json`, GET /account)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fullbore.explain.facts import Source


@dataclass
class Account:
    source: Source
    window_s: float
    stages: list[dict[str, float]]  # cause -> seconds

    def share(self, cause: str) -> float:
        """Mean share of the window over all stages."""
        total = self.window_s * len(self.stages)
        return sum(stage.get(cause, 0.0) for stage in self.stages) / total if total else 0.0

    def busy(self) -> list[float]:
        return [
            (stage.get("compute", 0.0) + stage.get("host", 0.0)) / self.window_s if self.window_s else 0.0
            for stage in self.stages
        ]


def is_account(tree: Any) -> bool:
    if not isinstance(tree, dict) or not isinstance(tree.get("stages"), list) or not tree["stages"]:
        return False
    return all(isinstance(stage, dict) and isinstance(stage.get("seconds"), dict) for stage in tree["stages"])


def read(tree: dict[str, Any], file: str) -> Account:
    stages = [
        {str(cause): float(s) for cause, s in stage["seconds"].items() if isinstance(s, int | float)}
        for stage in tree["stages"]
    ]
    window = tree.get("window_s")
    window_s = float(window) if isinstance(window, int | float) else max(sum(stage.values()) for stage in stages)
    return Account(Source(file), window_s, stages)
