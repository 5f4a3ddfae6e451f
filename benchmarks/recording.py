"""What recording costs: microseconds for each micro-batch in the driver, and for each step in the driver and its stage.

    python benchmarks/recording.py

On its own: the best of some rounds of many calls each.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable

from fullbore.engine.messages import Executed, encode
from fullbore.engine.records import Records
from fullbore.scheduler.request import Request
from fullbore.scheduler.scheduler import Scheduler, SchedulerConfig
from fullbore.telemetry.spans import StageRecord

STAGES = 8
ROUNDS = 7
CALLS = 2000
STEP_S = 0.005


def main() -> None:
    scheduler = Scheduler(SchedulerConfig(num_kv_blocks=10_000, pp_size=STAGES))
    for request_id in range(32):
        scheduler.add(Request(request_id, [1] * 10, 1000))
    micro_batch = scheduler.next_micro_batch(0.0)
    records = Records(STAGES, scheduler.in_flight_limit, 0)
    step = StageRecord(3, 0, *[10**15] * 8)

    def make_step() -> None:
        times_ns = [time.monotonic_ns() for _ in range(8)]
        encode(Executed(StageRecord(3, 0, *times_ns), None))

    launch_us = microseconds(lambda: records.add_event(scheduler.record("launch", time.monotonic_ns(), micro_batch)))
    result_us = microseconds(lambda: records.add_event(scheduler.record("result", time.monotonic_ns(), micro_batch)))
    add_us = microseconds(lambda: records.add_step(step))
    make_us = microseconds(make_step)
    print(f"Python {platform.python_version()}, {platform.processor() or platform.machine()}")
    print(
        f"driver, each micro-batch  {launch_us + result_us:6.2f} µs  (launch {launch_us:.2f}, result {result_us:.2f})"
    )
    print(f"driver, each step         {add_us:6.2f} µs")
    print(
        f"stage, each step          {make_us:6.2f} µs  ({make_us * 1e-6 / STEP_S:.3%} of a step of {STEP_S * 1e3:g} ms)"
    )


def microseconds(call: Callable[[], object]) -> float:
    """For one call."""
    rounds = []
    for _ in range(ROUNDS):
        start_s = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - start_s) / CALLS)
    return min(rounds) * 1e6


if __name__ == "__main__":
    main()
