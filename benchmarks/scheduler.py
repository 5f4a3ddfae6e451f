"""What the scheduler itself costs: microseconds per micro-batch and per scheduled request, and the simulator's speed.

    python benchmarks/scheduler.py [--json FILE]

Processor time, so that other work on the machine disturbs less, of `next_micro_batch` + `observe` of every stage +
`complete`, in the steady state of two and of eight stages: decoding requests only, prefix cache on.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

from fullbore.plan.curves import CurveCosts, decode_curve
from fullbore.plan.pipeline import Pipeline, probe
from fullbore.plan.simulate import kv_blocks_for, simulate
from fullbore.plan.workload import closed_loop
from fullbore.scheduler.request import Request
from fullbore.scheduler.scheduler import Scheduler, SchedulerConfig
from fullbore.telemetry.spans import StageRecord

RUNNING = (16, 256, 4096)
STAGES = (2, 8)
ROUNDS = 5
MAX_TOKENS = 1000


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", metavar="FILE", help="also write the figures there")
    arguments.add_argument("--no-simulator", action="store_true", help="leave out the simulation, the longest part")
    chosen = arguments.parse_args()

    print(f"Python {platform.python_version()}, {platform.processor() or platform.machine()}")
    print(f"{'stages':>6} {'running':>8} {'requests each':>14} {'µs/micro-batch':>15} {'µs/request':>11}")
    rows = []
    for stages in STAGES:
        for running in RUNNING:
            row = step_cost(stages, running)
            rows.append(row)
            print(
                f"{stages:>6} {running:>8} {row['requests_each']:>14.1f} "
                f"{row['us_per_micro_batch']:>15.1f} {row['us_per_request']:>11.2f}"
            )
    figures: dict[str, Any] = {"steps": rows}
    if not chosen.no_simulator:
        for is_learning in (False, True):
            seconds, tokens = simulator_speed(is_learning)
            name = "learning from records" if is_learning else "spans off, not learning"
            print(f"simulator, 64 stages, 10,000 × 32 tokens at 1,024, {name}: {seconds:.1f} s ({tokens} tokens)")
            figures[f"simulator_s_learning_{is_learning}".lower()] = seconds
    if chosen.json:
        with open(chosen.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)


def step_cost(stages: int, running: int) -> dict[str, Any]:
    """Median of some rounds, each of which gives every running request a few tokens."""
    blocks = running * (MAX_TOKENS // 16 + 2)
    config = SchedulerConfig(pp_size=stages, num_kv_blocks=blocks, max_running_requests=running)
    scheduler = Scheduler(config)
    costs = CurveCosts(decode_s=decode_curve("affine", 8, 0.01), stage_factors=[1.0] * stages)
    probe(scheduler.costs, Pipeline(num_stages=stages, costs=costs), running)
    for i in range(running):
        scheduler.add(Request(i, [i] * 8, MAX_TOKENS))
    driver = Driver(scheduler, costs)
    driver.run_until(lambda: scheduler.state().waiting == 0)
    driver.run_for(4 * stages)

    tokens_each = max(4, 2000 // running)
    results = []
    for _ in range(ROUNDS):
        before = scheduler.state()
        seconds = driver.run_for(tokens_each * stages)
        after = scheduler.state()
        launched = after.micro_batches - before.micro_batches
        results.append((seconds / launched, (after.generated_tokens - before.generated_tokens) / launched))
    per_micro_batch_s = statistics.median(seconds for seconds, _ in results)
    requests_each = statistics.median(each for _, each in results)
    return {
        "stages": stages,
        "running": running,
        "requests_each": requests_each,
        "us_per_micro_batch": per_micro_batch_s * 1e6,
        "us_per_request": per_micro_batch_s * 1e6 / requests_each,
    }


class Driver:
    """Keeps as much in flight as the scheduler lets it, and times the scheduler alone."""

    def __init__(self, scheduler: Scheduler, costs: CurveCosts) -> None:
        self.scheduler = scheduler
        self.costs = costs
        self.now_s = 0.0
        self.in_flight: list[tuple[int, int]] = []

    def run_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self.run_for(1)

    def run_for(self, results: int) -> float:
        """Takes in so many results; seconds spent in the scheduler."""
        spent_s = 0.0
        for _ in range(results):
            while True:
                start_s = time.process_time()
                micro_batch = self.scheduler.next_micro_batch(self.now_s)
                spent_s += time.process_time() - start_s
                if micro_batch is None:
                    break
                self.in_flight.append((micro_batch.id, micro_batch.num_sampled))
            micro_batch_id, num_sampled = self.in_flight.pop(0)
            self.now_s += 0.01
            records = self._records(micro_batch_id)
            tokens = [1] * num_sampled
            start_s = time.process_time()
            for record in records:
                self.scheduler.observe(record)
            self.scheduler.complete(micro_batch_id, tokens, self.now_s)
            spent_s += time.process_time() - start_s
        return spent_s

    def _records(self, micro_batch_id: int) -> list[StageRecord]:
        end_ns = round(self.now_s * 1e9)
        stages = self.scheduler.config.pp_size
        starts = [end_ns - (stages - stage) * 10_000_000 for stage in range(stages)]
        return [
            StageRecord(
                stage, micro_batch_id, t, t, t, t, t + 10_000_000, t + 10_000_000, t + 10_000_000, t + 10_000_000
            )
            for stage, t in enumerate(starts)
        ]


def simulator_speed(is_learning: bool) -> tuple[float, int]:
    """Seconds for 10,000 requests of 32 output tokens at concurrency 1,024 on 64 stages."""
    costs = CurveCosts(decode_s=decode_curve("affine", 16, 0.01), stage_factors=[1.0] * 64, prefill_token_s=40e-6)
    work = closed_loop(1024, 10_000, 64, 32)
    config = SchedulerConfig(pp_size=64, num_kv_blocks=kv_blocks_for(work), max_running_requests=1024)
    pipeline = Pipeline(num_stages=64, costs=costs, driver_s=0.002)
    start_s = time.process_time()
    simulate(pipeline, config, work, learns=is_learning, record_until_s=-1.0)
    return time.process_time() - start_s, 10_000 * 32


if __name__ == "__main__":
    main()
