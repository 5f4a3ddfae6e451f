"""What a pipeline of two stages makes of two cores: one thread a stage, micro-batches of constant size.

    python benchmarks/pipeline_efficiency.py [--model MODEL] [--micro-batch 1,4,8] [--rounds 3] [--json FILE]

P = 1 decodes one micro-batch of b requests at a time on one core; P = 2 has two of them in flight, each on half of the
layers. Ideal is twice P = 1's tokens/s. What is missing from that is told by the account of the stages: idle for which
cause; the rest is busy time that grew, since two stages share the memory's bandwidth and nobody splits layers evenly.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from prediction import run_closed_loop

from fullbore.config import DEFAULT_MODEL, EngineConfig
from fullbore.engine.client import EngineClient
from fullbore.telemetry.accounting import BUSY, account


@dataclass
class Row:
    """One micro-batch size."""

    micro_batch: int
    one_stage_tok_s: float
    two_stages_tok_s: float
    busy: list[float]  # share of each of the two stages
    idle: dict[str, float]  # mean share by cause

    @property
    def efficiency(self) -> float:
        return self.two_stages_tok_s / (2 * self.one_stage_tok_s)


def measure(client: EngineClient, requests: int, rounds: int) -> tuple[float, list[dict[str, int]]]:
    """Median tokens/s of closed loops, and the account of the last."""
    rates = []
    for _ in range(rounds):
        since_ns = time.monotonic_ns()
        rates.append(run_closed_loop(client, requests, 64, 64))
    return median(rates), account(client.records(0.0, since_ns))


def compare(one: EngineClient, two: EngineClient, size: int, rounds: int) -> Row:
    one_tok_s, _ = measure(one, size, rounds)
    two_tok_s, stages = measure(two, 2 * size, rounds)
    windows = [sum(stage.values()) for stage in stages]
    busy = [sum(stage[cause] for cause in BUSY) / window for stage, window in zip(stages, windows, strict=True)]
    causes = [cause for cause in stages[0] if cause not in BUSY]
    idle = {cause: sum(s[cause] / w for s, w in zip(stages, windows, strict=True)) / len(stages) for cause in causes}
    return Row(size, one_tok_s, two_tok_s, busy, {cause: share for cause, share in idle.items() if share >= 0.005})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--micro-batch", default="1,4,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    chosen = parser.parse_args()
    rows = []
    with (
        EngineClient.start(EngineConfig(model=chosen.model, pp_size=1, num_micro_batches=1)) as one,
        EngineClient.start(EngineConfig(model=chosen.model, pp_size=2, num_micro_batches=2)) as two,
    ):
        print("requests in a  tok/s of   tok/s of                   stages")
        print("  micro-batch     P = 1      P = 2  ideal  reached  busy     idle for")
        for size in map(int, chosen.micro_batch.split(",")):
            row = compare(one, two, size, chosen.rounds)
            rows.append(row)
            busy = " ".join(f"{share:.0%}" for share in row.busy)
            causes = ", ".join(f"{c} {s:.0%}" for c, s in sorted(row.idle.items(), key=lambda item: -item[1]))
            print(
                f"{size:>13} {row.one_stage_tok_s:>9.1f} {row.two_stages_tok_s:>10.1f} {2 * row.one_stage_tok_s:>6.0f}"
                f" {row.efficiency:>8.0%}  {busy:8} {causes}",
                flush=True,
            )
    if chosen.json:
        figures = [asdict(row) | {"efficiency": row.efficiency} for row in rows]
        chosen.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
