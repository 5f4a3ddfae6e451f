"""The scheduler follows costs that change while it serves."""

from __future__ import annotations

from dataclasses import dataclass, field

from plan_helpers import MS, endless, kv_blocks_for, pipeline

from fullbore.plan.loads import Load
from fullbore.plan.pipeline import Pipeline, probe
from fullbore.plan.simulate import Simulation
from fullbore.scheduler.scheduler import Scheduler, SchedulerConfig

CHANGE_AT = 300  # micro-batches
SETTLED_AFTER = 150


@dataclass
class LastStageSlowsDown:
    """Four stages that take 10 ms whatever the size; the last takes twice as long from some micro-batch on."""

    sizes: list[int] = field(default_factory=list)

    def seconds(self, load: Load) -> list[float]:
        self.sizes.append(load.tokens)
        return [10 * MS] * 3 + [(20 if len(self.sizes) > CHANGE_AT else 10) * MS]


def test_m_follows_a_stage_that_slows_down() -> None:
    """Eight requests in four micro-batches; then two are best: max(3·10 + 20, 2·20) = 50 ms instead of 4·20."""
    costs = LastStageSlowsDown()
    work = endless(8, 400)
    config = SchedulerConfig(pp_size=4, num_kv_blocks=kv_blocks_for(work), max_running_requests=8)
    scheduler = Scheduler(config)
    probe(scheduler.costs, pipeline([1.0] * 4, stage_s=10 * MS), max_requests=8)
    Simulation(Pipeline(num_stages=4, costs=costs), scheduler, work).run()
    assert set(costs.sizes[100:CHANGE_AT]) == {2}
    settled = costs.sizes[CHANGE_AT + SETTLED_AFTER : -10]
    assert len(settled) > 300
    assert set(settled) == {4}
