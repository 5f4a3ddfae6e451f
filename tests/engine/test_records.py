"""What the driver remembers, and over which time it can vouch for it."""

from __future__ import annotations

import pytest

from fullbore.engine import records as records_module
from fullbore.engine.records import Records
from fullbore.telemetry.spans import DriverRecord, StageRecord

STEP_NS = 1000
STARTED_NS = 500


def launch(micro_batch_id: int, at_ns: int) -> DriverRecord:
    return DriverRecord(at_ns, "launch", micro_batch_id, 3, 0, 1, 2, 9, False, num_requests=2)


def step(stage: int, micro_batch_id: int, begin_ns: int, end_ns: int) -> StageRecord:
    return StageRecord(stage, micro_batch_id, *[begin_ns] * 4, *[end_ns] * 4)


def pipeline_of(num_micro_batches: int, pp_size: int = 2) -> Records:
    """One micro-batch launched every STEP_NS; each stage takes STEP_NS, the second begins where the first ends."""
    records = Records(pp_size, 4, STARTED_NS)
    for number in range(num_micro_batches):
        begin_ns = 10_000 + number * STEP_NS
        records.add_event(launch(number, begin_ns))
        for stage in range(pp_size):
            records.add_step(step(stage, number, begin_ns + stage * STEP_NS, begin_ns + (stage + 1) * STEP_NS))
    return records


def test_before_the_first_request() -> None:
    recording = Records(2, 4, STARTED_NS).recording(10_000, seconds=1.0)
    assert (recording.start_ns, recording.end_ns) == (STARTED_NS, 10_000)
    assert (recording.stage_records, recording.driver_records) == ([], [])


def test_window_is_as_long_as_asked_for_and_ends_now_when_all_is_done() -> None:
    recording = pipeline_of(50).recording(now_ns=100_000, seconds=30e-6)
    assert (recording.start_ns, recording.end_ns) == (70_000, 100_000)
    recording = pipeline_of(50).recording(now_ns=100_000, seconds=1.0)
    assert (recording.start_ns, recording.end_ns) == (STARTED_NS, 100_000)
    assert len(recording.stage_records) == 100
    assert len(recording.driver_records) == 50


def test_window_ends_where_a_stage_may_be_at_work() -> None:
    records = pipeline_of(50)  # the last step of stage 0 ended at 60,000, that of stage 1 at 61,000
    records.add_event(launch(50, 62_000))
    assert records.recording(100_000, seconds=1.0).end_ns == 62_000
    records.add_event(launch(51, 63_000))
    assert records.recording(100_000, seconds=1.0).end_ns == 62_000
    records.add_step(step(0, 50, 62_000, 70_000))
    assert records.recording(100_000, seconds=1.0).end_ns == 62_000, "stage 1 has not begun"
    records.add_step(step(0, 51, 70_000, 75_000))
    records.add_step(step(1, 50, 70_000, 78_000))
    assert records.recording(100_000, seconds=1.0).end_ns == 78_000
    records.add_step(step(1, 51, 78_000, 80_000))
    assert records.recording(100_000, seconds=1.0).end_ns == 100_000


def test_window_never_ends_before_an_earlier_one_did() -> None:
    records = pipeline_of(50)
    idle = records.recording(now_ns=90_000, seconds=1.0)
    records.add_event(launch(50, 91_000))
    assert records.recording(now_ns=92_000, seconds=0.0, since_ns=idle.end_ns).end_ns == 91_000


def test_window_ends_at_the_first_launch_if_no_step_has_ended() -> None:
    records = Records(2, 4, STARTED_NS)
    records.add_event(DriverRecord(800, "arrival", -1, 0, 1, 0, 0, 9, False))
    records.add_event(launch(0, 900))
    assert records.recording(5000, seconds=1.0).end_ns == 900


def test_what_came_before_the_window_is_there_to_explain_it() -> None:
    recording = pipeline_of(50).recording(now_ns=60_500, seconds=10e-6)
    ids = [record.micro_batch_id for record in recording.driver_records]
    first_in_window = (recording.start_ns - 10_000 + STEP_NS - 1) // STEP_NS
    assert ids == list(range(first_in_window - 16, 50)), "four times the in-flight limit"
    assert {record.micro_batch_id for record in recording.stage_records} == set(ids)


def test_going_on_from_where_the_last_window_ended() -> None:
    records = pipeline_of(50)
    first = records.recording(now_ns=65_000, seconds=1.0)
    second = records.recording(now_ns=70_000, seconds=0.0, since_ns=first.end_ns)
    assert (second.start_ns, second.end_ns) == (first.end_ns, 70_000)
    later = records.recording(now_ns=70_000, seconds=0.0, since_ns=99_000)
    assert (later.start_ns, later.end_ns) == (70_000, 70_000)


def test_rings_are_bounded_and_forgotten_time_is_not_vouched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "_RECENT_MICRO_BATCHES", 8)
    recording = pipeline_of(50).recording(now_ns=61_000, seconds=1.0)
    assert len(recording.stage_records) <= 2 * 8
    oldest = [min(r.send_end_ns for r in recording.stage_records if r.stage == stage) for stage in (0, 1)]
    assert recording.start_ns == max(oldest)
    assert recording.end_ns == 61_000


def test_counters() -> None:
    records = pipeline_of(3)
    assert records.in_flight_at_launch == {2: 3}
    assert records.requests_in_micro_batch == {2: 3}
    assert records.stage_busy_s == pytest.approx([3e-6, 3e-6])
    records.add_step(step(1, 3, 0, 20_000_000), used_graph=True)
    assert records.graph_steps == [0, 1]
    records.add_step(step(1, 4, 0, 60_000_000_000))
    assert records.steps_in_bucket[1][0] == 3
    assert records.steps_in_bucket[1][records_module.STEP_BUCKETS_S.index(0.02)] == 1, "bounds belong to their bucket"
    assert records.steps_in_bucket[1][-1] == 1
    assert sum(records.steps_in_bucket[0]) == 3
