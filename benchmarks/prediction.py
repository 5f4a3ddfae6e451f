"""How well the simulator predicts the engine: closed loops on a real engine, and the same on stage times of that run.

    python benchmarks/prediction.py [--model MODEL] [--pp-size 2] [--concurrency 1,4,8,16] [--json FILE]

MODEL may be a sleep model (`sleep://layers=8,layer_ms=4,token_ms=0.2`): stages of real processes that only sleep, so
that more stages than cores do overlap.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from itertools import count
from typing import Any

from fullbore.config import DEFAULT_MODEL, EngineConfig
from fullbore.engine.client import EngineClient
from fullbore.engine.messages import AddRequest, Rejected
from fullbore.engine.start_up import scheduler_config
from fullbore.plan.measured import pipeline_of
from fullbore.plan.simulate import simulate
from fullbore.plan.workload import closed_loop

GENERATIONS = 3


@dataclass(frozen=True)
class Comparison:
    """Output tokens/s in the steady part of a closed loop."""

    concurrency: int
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", default=DEFAULT_MODEL)
    arguments.add_argument("--pp-size", type=int, default=2)
    arguments.add_argument("--concurrency", default="1,4,8,16")
    arguments.add_argument("--input-tokens", type=int, default=64)
    arguments.add_argument("--output-tokens", type=int, default=64)
    arguments.add_argument("--json", metavar="FILE")
    chosen = arguments.parse_args()
    concurrencies = [int(part) for part in chosen.concurrency.split(",")]
    rows = []
    with EngineClient.start(EngineConfig(model=chosen.model, pp_size=chosen.pp_size)) as client:
        print(f"{'clients':>8} {'measured tok/s':>15} {'predicted':>10} {'error':>7}")
        for concurrency in concurrencies:
            row = compare(client, concurrency, chosen.input_tokens, chosen.output_tokens)
            rows.append(row)
            print(f"{concurrency:>8} {row.measured:>15.1f} {row.predicted:>10.1f} {row.error:>+7.1%}", flush=True)
    if chosen.json:
        figures: list[dict[str, Any]] = [row.__dict__ | {"error": row.error} for row in rows]
        with open(chosen.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)


def compare(client: EngineClient, concurrency: int, prompt: int, output: int) -> Comparison:
    """Runs a closed loop on the engine, then simulates it with the stage times that were recorded meanwhile."""
    since_ns = time.monotonic_ns()
    measured = run_closed_loop(client, concurrency, prompt, output)
    recording = client.records(0.0, since_ns)
    info = client.info
    predicted = simulate(
        pipeline_of(recording),
        scheduler_config(info.config, info.num_kv_blocks, info.context_length),
        closed_loop(concurrency, GENERATIONS * concurrency, prompt, output),
    )
    return Comparison(concurrency, measured, predicted.steady.output_tokens_per_s)


def run_closed_loop(client: EngineClient, concurrency: int, prompt: int, output: int) -> float:
    """Tokens/s from the first answer's end to the first client that finds nothing left to ask."""
    total = GENERATIONS * concurrency
    seeds = count(time.monotonic_ns() % 1_000_003)  # prompts that no prefix cache knows
    token_times_s: list[float] = []
    end_times_s: list[float] = []

    def ask() -> None:
        seed = next(seeds)
        tokens = [(seed * 31 + position * 17) % 900 + 10 for position in range(prompt)]
        client.add(AddRequest(client.next_request_id(), tokens, output, 0.0, 1.0, 0, 0, ignore_eos=True))

    for _ in range(concurrency):
        ask()
    num_sent = concurrency
    while len(end_times_s) < total:
        for message in client.receive(1.0):
            if isinstance(message, Rejected):
                raise SystemExit(f"refused: {message.message}")
            now_s = time.monotonic()
            for token in message.outputs:
                token_times_s.append(now_s)
                if token.finish_reason is not None:
                    end_times_s.append(now_s)
                    if num_sent < total:
                        ask()
                        num_sent += 1
    start_s, end_s = end_times_s[0], end_times_s[total - concurrency]
    return sum(start_s < at_s <= end_s for at_s in token_times_s) / (end_s - start_s)


if __name__ == "__main__":
    main()
