"""fullbore's own account: seconds of each stage by cause, from recordings, /account, /metrics or `fullbore bench`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fullbore.explain.facts import Source
from fullbore.explain.replay import Replay

# Idle causes that compete for being the bottleneck.
CAUSES = ("few-requests", "packed", "depth", "uneven", "imbalance", "transfer", "control", "memory")


@dataclass
class Account:
    """Shares leave out the time in which there was no request at all. The fields from `running` on need a recording.

    Attributes:
        kind: what it was read from: recording, bench, account or metrics.
        stage_s: what a micro-batch takes on each stage, the median; of a bench, all that each computed.
    """

    source: Source
    window_s: float
    stages: list[dict[str, float]]  # cause -> seconds
    kind: str = "account"
    concurrency: int | None = None  # clients of the bench
    tok_s: float | None = None
    device: str | None = None
    running: float | None = None  # requests being served, median over launches
    waiting: float | None = None
    micro_batch: float | None = None  # requests in a micro-batch, median over launches
    stage_s: list[float] = field(default_factory=list)  # median time of a micro-batch on each stage
    layers: list[int] = field(default_factory=list)
    replay: Replay | None = None

    def share(self, cause: str) -> float:
        """Mean over all stages, of the time in which there were requests."""
        total = sum(self._window(stage) for stage in self.stages)
        return sum(stage.get(cause, 0.0) for stage in self.stages) / total if total > 0 else 0.0

    def shares(self, cause: str) -> list[float]:
        """Of each stage."""
        windows = [self._window(stage) for stage in self.stages]
        return [
            stage.get(cause, 0.0) / window if window > 0 else 0.0
            for stage, window in zip(self.stages, windows, strict=True)
        ]

    @property
    def request_s(self) -> float:
        """The time in which there were requests, of the stage that saw most of it."""
        return max((self._window(stage) for stage in self.stages), default=0.0)

    @property
    def name(self) -> str:
        """The load that it is of, and where it stands."""
        return self.source.file if self.concurrency is None else f"concurrency {self.concurrency}"

    def largest(self) -> str:
        """The idle cause that costs most."""
        return max(CAUSES, key=self.share)

    def busy(self) -> list[float]:
        return [
            (stage.get("compute", 0.0) + stage.get("host", 0.0)) / window
            if (window := self._window(stage)) > 0
            else 0.0
            for stage in self.stages
        ]

    def _window(self, stage: dict[str, float]) -> float:
        return max(self.window_s - stage.get("no-requests", 0.0), 0.0)


def is_account(tree: Any) -> bool:
    if not isinstance(tree, dict) or not isinstance(tree.get("stages"), list) or not tree["stages"]:
        return False
    return all(isinstance(stage, dict) and isinstance(stage.get("seconds"), dict) for stage in tree["stages"])


def read(tree: dict[str, Any], file: str) -> Account:
    stages = [
        {str(cause): float(s) for cause, s in stage["seconds"].items() if isinstance(s, int | float) and 0 <= s < 1e9}
        for stage in tree["stages"]
    ]
    window = tree.get("window_s")
    is_known = isinstance(window, int | float) and 0 < window < 1e9
    window_s = float(window) if is_known else max(sum(stage.values()) for stage in stages)  # type: ignore[arg-type]
    return Account(Source(file), window_s, stages)
