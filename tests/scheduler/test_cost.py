"""What the scheduler learns from the stages' records."""

from __future__ import annotations

import pytest

from fullbore.scheduler.cost import sizes_to_measure
from fullbore.scheduler.request import Request
from fullbore.scheduler.scheduler import Scheduler, SchedulerConfig
from fullbore.telemetry.spans import StageRecord

MS = 1_000_000


def record(stage: int, micro_batch_id: int, *, plan: float, start: float, end: float) -> StageRecord:
    """Times in ms. The receive was posted with the plan and ended when the stage got to it."""
    plan_ns, start_ns, end_ns = round(plan * MS), round(start * MS), round(end * MS)
    receive_end_ns = start_ns if stage else plan_ns
    return StageRecord(
        stage, micro_batch_id, plan_ns, plan_ns, receive_end_ns, start_ns, end_ns, end_ns, end_ns, end_ns
    )


def launch(scheduler: Scheduler, now_ms: float, request_id: int) -> int:
    scheduler.add(Request(request_id, [request_id] * 4, 8, arrival_s=now_ms * 1e-3))
    micro_batch = scheduler.next_micro_batch(now_ms * 1e-3)
    assert micro_batch is not None
    return micro_batch.id


def test_ways_to_idle_stages_are_learned() -> None:
    scheduler = Scheduler(SchedulerConfig(pp_size=2, num_kv_blocks=100))
    first = launch(scheduler, 100.0, request_id=1)
    scheduler.observe(record(0, first, plan=100.5, start=100.5, end=110))
    scheduler.observe(record(1, first, plan=100.5, start=112, end=122))
    scheduler.complete(first, [1], 0.125)
    assert scheduler.costs.plan_s == pytest.approx(0.5e-3)
    assert scheduler.costs.hops_s == pytest.approx([0, 2e-3])
    assert scheduler.costs.return_s == pytest.approx(3e-3)
    assert scheduler.costs.overhead_s == pytest.approx(5.5e-3)


def test_waiting_for_a_busy_stage_is_not_taken_for_the_way_to_it() -> None:
    scheduler = Scheduler(SchedulerConfig(pp_size=2, num_kv_blocks=100))
    first = launch(scheduler, 100.0, request_id=1)
    second = launch(scheduler, 101.0, request_id=2)
    scheduler.observe(record(0, first, plan=100.5, start=100.5, end=110))
    scheduler.observe(record(0, second, plan=110, start=110, end=120))  # read when stage 0 was done with the first
    scheduler.observe(record(1, first, plan=100.5, start=112, end=142))
    scheduler.observe(record(1, second, plan=101.5, start=142, end=172))  # came at 122, while stage 1 was busy
    assert scheduler.costs.plan_s == pytest.approx(0.5e-3)
    assert scheduler.costs.hops_s == pytest.approx([0, 2e-3])


def test_a_way_thought_longer_than_it_can_be_gets_shorter() -> None:
    scheduler = Scheduler(SchedulerConfig(pp_size=2, num_kv_blocks=100))
    scheduler.costs.hops_s[1] = 50e-3
    first = launch(scheduler, 100.0, request_id=1)
    scheduler.observe(record(0, first, plan=100, start=100, end=110))
    scheduler.observe(record(1, first, plan=115, start=116, end=126))  # plan read late: 6 ms is an upper bound
    assert 6e-3 < scheduler.costs.hops_s[1] < 50e-3


def test_sizes_to_measure() -> None:
    assert sizes_to_measure(1) == [1]
    assert sizes_to_measure(2) == [1, 2]
    assert sizes_to_measure(3) == [1, 2, 3]
    assert sizes_to_measure(16) == [1, 2, 4, 8, 16, 3, 6, 12]
    assert sizes_to_measure(20) == [1, 2, 4, 8, 16, 20, 3, 6, 12]
