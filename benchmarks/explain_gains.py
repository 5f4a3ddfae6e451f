"""Engines started wrong on purpose: what `fullbore explain` says from the recording, and what the fix then brings.

    python benchmarks/explain_gains.py [--fault NAME] [--json FILE]

Stages are real processes that sleep (`sleep://`), so that four of them overlap on fewer cores. Each fault is recorded
under a closed loop of clients, judged from the recording's file alone, fixed as the verdict says, and measured again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prediction import run_closed_loop

from fullbore.config import EngineConfig
from fullbore.engine.client import EngineClient
from fullbore.explain.run import explain
from fullbore.telemetry.recording import StageDescription, Timeline, write_timeline

STAGES = 4
MODEL = "sleep://layers=8,layer_ms=8,token_ms=2"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """An engine and its clients."""

    model: str = MODEL
    clients: int = 12
    prompt_tokens: int = 8
    output_tokens: int = 16
    settings: dict[str, Any] = field(default_factory=dict)

    def with_settings(self, **settings: object) -> Setup:
        return replace(self, settings=self.settings | settings)


@dataclass(frozen=True)
class Fault:
    """What is wrong, the verdict that it must get, and the fix: the setup made from the wrong one and the answer."""

    name: str
    wrong: Setup
    verdict: str
    fix: Callable[[Setup, dict[str, Any]], Setup]


def _suggested_split(wrong: Setup, answer: dict[str, Any]) -> Setup:
    """The partition that the verdict names."""
    words = [line.split() for line in answer["verdicts"][0]["fix"] if line.startswith("--pp-layer-partition")]
    return wrong.with_settings(pp_layer_partition=tuple(int(layers) for layers in words[0][1].split(",")))


FAULTS = (
    Fault("one client", Setup(clients=1), "few-requests", lambda wrong, _: replace(wrong, clients=STAGES)),
    Fault("two clients", Setup(clients=2), "few-requests", lambda wrong, _: replace(wrong, clients=STAGES)),
    Fault(
        "all in one micro-batch",
        Setup(settings={"num_micro_batches": 1}),
        "packed-slot",
        lambda wrong, _: wrong.with_settings(num_micro_batches="auto"),
    ),
    Fault("bad layer split", Setup(settings={"pp_layer_partition": (1, 2, 1, 4)}), "imbalance", _suggested_split),
    Fault(
        "slow link",
        Setup(model=f"{MODEL},hop_ms=30", clients=STAGES),
        "slow-link",
        lambda wrong, _: replace(wrong, model=MODEL),
    ),
    Fault(
        "tiny KV cache",
        Setup(clients=6, settings={"max_total_tokens": 64}),
        "kv-limited",
        lambda wrong, _: wrong.with_settings(max_total_tokens=16_384),
    ),
)


@dataclass(frozen=True)
class Outcome:
    """Gains are factors of tokens/s."""

    fault: str
    expected: str
    verdict: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--fault", choices=[fault.name for fault in FAULTS], help="only this one")
    arguments.add_argument("--json", metavar="FILE")
    chosen = arguments.parse_args()
    outcomes = []
    print(f"{'fault':<24} {'verdict':<14} {'predicted gain':>14} {'measured gain':>14} {'error':>7}")
    for fault in FAULTS:
        if chosen.fault in (None, fault.name):
            outcome = try_out(fault)
            outcomes.append(outcome)
            print(
                f"{fault.name:<24} {outcome.verdict:<14} {outcome.predicted:>13.2f}x {outcome.measured:>13.2f}x "
                f"{outcome.error:>+7.1%}",
                flush=True,
            )
    if chosen.json:
        figures = [outcome.__dict__ | {"error": outcome.error} for outcome in outcomes]
        Path(chosen.json).write_text(json.dumps(figures, indent=1), encoding="utf-8")


def try_out(fault: Fault) -> Outcome:
    """Runs it wrong, asks for the verdict, runs it fixed."""
    before, answer = run(fault.wrong)
    first = answer["verdicts"][0]
    predicted = (first["gain"]["low"] + first["gain"]["high"]) / 2 if first["gain"]["low"] else float("nan")
    fixed = fault.fix(fault.wrong, answer) if first["id"] == fault.verdict else fault.wrong
    after, _ = run(fixed)
    return Outcome(fault.name, fault.verdict, first["id"], predicted, after / before)


def run(setup: Setup) -> tuple[float, dict[str, Any]]:
    """Tokens/s of a closed loop, and what `fullbore explain --json` says of its recording."""
    settings = {"pp_size": STAGES, "max_total_tokens": 16_384, **setup.settings}
    with EngineClient.start(EngineConfig(model=setup.model, **settings)) as client:
        since_ns = time.monotonic_ns()
        tokens_per_s = run_closed_loop(client, setup.clients, setup.prompt_tokens, setup.output_tokens)
        recording = client.records(0.0, since_ns)
        stages: Sequence[StageDescription] = [StageDescription(s.layers, s.device) for s in client.info.stages]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.fbr"
        write_timeline(file, Timeline(model=setup.model, stages=list(stages), recording=recording))
        return tokens_per_s, explain([file]).answer


if __name__ == "__main__":
    main()
