"""What the driver remembers of recent micro-batches, and its counters."""

from __future__ import annotations

from collections import Counter, deque

from msgspec import Struct

from fullbore.scheduler.micro_batch import LaunchReason, MicroBatch
from fullbore.telemetry.spans import StageRecord

_RECENT_MICRO_BATCHES = 4096


class LaunchRecord(Struct, array_like=True, gc=False):
    """One launch, as the driver saw it. `reason_since_s` and `launched_ns` are on the same monotonic clock."""

    micro_batch_id: int
    launched_ns: int
    reason: LaunchReason
    reason_since_s: float
    num_requests: int
    num_tokens: int
    in_flight: int  # this one included


class Records:
    """Bounded: the newest records and the counters since the start."""

    def __init__(self, num_stages: int) -> None:
        self.launches: deque[LaunchRecord] = deque(maxlen=_RECENT_MICRO_BATCHES)
        self.stage_records: deque[StageRecord] = deque(maxlen=_RECENT_MICRO_BATCHES * num_stages)
        self.in_flight_at_launch: Counter[int] = Counter()
        self.requests_in_micro_batch: Counter[int] = Counter()
        self.stage_busy_s = [0.0] * num_stages

    def launched(self, micro_batch: MicroBatch, launched_ns: int, in_flight: int) -> None:
        reason, since_s = micro_batch.launch_reason, micro_batch.launch_reason_since_s
        num_requests = len({run.request_id for run in micro_batch.runs})
        self.launches.append(
            LaunchRecord(micro_batch.id, launched_ns, reason, since_s, num_requests, micro_batch.num_tokens, in_flight)
        )
        self.in_flight_at_launch[in_flight] += 1
        self.requests_in_micro_batch[num_requests] += 1

    def executed(self, record: StageRecord) -> None:
        self.stage_records.append(record)
        self.stage_busy_s[record.stage] += (record.sample_end_ns - record.compute_start_ns) * 1e-9
