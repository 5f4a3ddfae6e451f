"""Draws the pictures in docs/accounting.md again: what the simulator does and what the accounting says about it.

    python docs/accounting_pictures.py [--check]

With --check nothing is written; the exit code is 1 if something would change.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullbore.plan.loads import Load
from fullbore.plan.pipeline import Hop, Pipeline
from fullbore.plan.simulate import simulate
from fullbore.plan.workload import Job, Workload, closed_loop
from fullbore.scheduler.scheduler import SchedulerConfig
from fullbore.telemetry.accounting import CAUSES, Recording, pieces
from fullbore.telemetry.report import LOOKS

PAGE = Path(__file__).parent / "accounting.md"
COLUMNS = 64
STAGE_S = 0.010
LONG = 60  # output tokens
_ORDER = sorted(CAUSES, key=lambda cause: cause == "no-requests")  # what comes first in most waits
_BLOCK = re.compile(r"```text picture (.*)\n(?:.*\n)*?```")


@dataclass(frozen=True)
class Costs:
    """Every step takes STAGE_S times the stage's factor, times what `factor` says of the micro-batch."""

    factors: Sequence[float]
    factor: Callable[[Load], float] = lambda load: 1.0

    def seconds(self, load: Load) -> Sequence[float]:
        return [each * STAGE_S * self.factor(load) for each in self.factors]


def by_requests(load: Load) -> float:
    return max(load.decodes, 1) / 4


@dataclass(frozen=True)
class Example:
    workload: Workload
    costs: Costs = field(default_factory=lambda: Costs([1.0] * 4))
    settings: dict[str, Any] = field(default_factory=dict)
    driver_s: float = 0.0
    hops: Sequence[Hop] = ()
    start_s: float = 0.3
    column_s: float = 0.0025

    def recording(self) -> Recording:
        num_stages = len(self.costs.factors)
        config = SchedulerConfig(**{"pp_size": num_stages, "num_kv_blocks": 10_000, **self.settings})
        pipeline = Pipeline(num_stages=num_stages, costs=self.costs, hops=self.hops, driver_s=self.driver_s)
        result = simulate(pipeline, config, self.workload, is_probed=False, learns=False, record_until_s=1e9)
        start_ns = round(self.start_s * 1e9)
        end_ns = start_ns + round(COLUMNS * self.column_s * 1e9)
        return Recording(num_stages, config.in_flight_limit, start_ns, end_ns, result.spans, result.driver_records)


EXAMPLES: dict[str, Example] = {
    "no-requests": Example(Workload([Job(16, 1, arrival_s=at_s) for at_s in (0.0, 0.09)]), start_s=0.0),
    "memory": Example(closed_loop(8, 32, 16, 30), settings={"num_kv_blocks": 8, "page_size": 16}, start_s=0.7),
    "few-requests": Example(closed_loop(2, 8, 16, LONG)),
    "packed": Example(closed_loop(8, 16, 16, LONG), settings={"num_micro_batches": 2}),
    "depth": Example(
        closed_loop(16, 32, 16, LONG), Costs([1.0] * 4, by_requests), {"pp_async_batch_depth": 0}, driver_s=0.02
    ),
    "uneven": Example(
        Workload([Job(2000 if n == 0 else 16, LONG) for n in range(4)], 4),
        Costs([1.0] * 4, lambda load: 3.0 if load.context_tokens > 1000 else 1.0),
        {"chunked_prefill_size": 4000},
    ),
    "imbalance": Example(closed_loop(16, 32, 16, LONG), Costs([1, 1, 2, 1], by_requests)),
    "transfer": Example(closed_loop(4, 16, 16, LONG), hops=[Hop(latency_s=0.005)] * 3),
    "control": Example(closed_loop(4, 16, 16, LONG), driver_s=0.03),
    "fill-drain": Example(
        closed_loop(1, 1, 640, 1), settings={"chunked_prefill_size": 64}, start_s=0.0, column_s=0.13 / COLUMNS
    ),
}


def draw(recording: Recording) -> list[str]:
    """One row per stage: capital letters are micro-batches at work, the others the causes of waits."""
    rows = []
    for stage, stage_pieces in enumerate(pieces(recording)):
        starts = sorted((r.compute_start_ns, r.micro_batch_id) for r in recording.stage_records if r.stage == stage)
        marks: list[tuple[int, str]] = []  # (nanoseconds, letter), one after the other
        for piece in stage_pieces:
            if not piece.is_wait:
                micro_batch_id = max(number for start_ns, number in starts if start_ns <= piece.begin_ns)
                marks.append((piece.end_ns - piece.begin_ns, chr(ord("A") + micro_batch_id % 26)))
            else:
                marks += [(piece.causes[c], LOOKS[c].letter) for c in _ORDER if piece.causes.get(c)]
        rows.append(f"stage {stage} |{_cells(marks, recording.end_ns - recording.start_ns)}|")
    return rows


def _cells(marks: list[tuple[int, str]], window_ns: int) -> str:
    text = ""
    end_ns = 0
    for ns, letter in marks:
        end_ns += ns
        text += letter * (round(end_ns / window_ns * COLUMNS) - len(text))
    return text


def refreshed(page: str) -> str:
    """The page with every picture as it is now."""
    return _BLOCK.sub(
        lambda block: "\n".join([f"```text picture {block[1]}", *draw(EXAMPLES[block[1]].recording()), "```"]), page
    )


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    fresh = refreshed(page)
    if "--check" in sys.argv[1:]:
        return int(fresh != page)
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
