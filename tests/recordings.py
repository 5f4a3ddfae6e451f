"""Recordings from the simulator, for tests of what is done with recordings. Use: `from recordings import ...`"""

from __future__ import annotations

from collections.abc import Sequence

from fullbore.plan.loads import Load
from fullbore.plan.pipeline import Hop, Pipeline
from fullbore.plan.simulate import simulate
from fullbore.plan.workload import closed_loop
from fullbore.scheduler.scheduler import SchedulerConfig
from fullbore.telemetry.accounting import Recording
from fullbore.telemetry.recording import StageDescription, Timeline


class _Costs:
    def __init__(self, num_stages: int) -> None:
        self._seconds = [0.01 + 0.002 * stage for stage in range(num_stages)]

    def seconds(self, load: Load) -> Sequence[float]:
        return self._seconds


def simulated_recording(pp_size: int = 3, concurrency: int = 2, start_ns: int = 10**12) -> Recording:
    """The middle of a closed loop, as if the clock had shown `start_ns` at its beginning."""
    config = SchedulerConfig(pp_size=pp_size, num_kv_blocks=1000)
    pipeline = Pipeline(
        num_stages=pp_size, costs=_Costs(pp_size), hops=[Hop(latency_s=0.001)] * (pp_size - 1), driver_s=0.001
    )
    workload = closed_loop(concurrency, 4 * concurrency, 100, 20)
    result = simulate(pipeline, config, workload, is_probed=False, learns=False, record_until_s=1e9)
    for step in result.spans:
        for name in step.__struct_fields__:
            if name.endswith("_ns"):
                setattr(step, name, getattr(step, name) + start_ns)
    for event in result.driver_records:
        event.at_ns += start_ns
        event.reason_since_ns += start_ns
    end_ns = start_ns + round(result.whole.end_s * 1e9)
    third = (end_ns - start_ns) // 3
    return Recording(
        pp_size,
        config.in_flight_limit,
        start_ns + third,
        end_ns - third,
        result.spans,
        result.driver_records,
        [{1: 0.01 + 0.002 * stage} for stage in range(pp_size)],
    )


def simulated_timeline(pp_size: int = 3, concurrency: int = 2) -> Timeline:
    stages = [StageDescription((2 * stage, 2 * stage + 2), "cpu") for stage in range(pp_size)]
    return Timeline(
        fullbore="1.2.3",
        model="tiny",
        stages=stages,
        captured_unix_s=1.7e9,
        recording=simulated_recording(pp_size, concurrency),
    )
