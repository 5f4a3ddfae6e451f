"""What the driver remembers: the newest records of the stages and of its own events, and counters since the start.

Everything here happens between two micro-batches of somebody's request, so it only appends and counts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque

from fullbore.telemetry.accounting import Recording
from fullbore.telemetry.spans import DriverRecord, StageRecord

_RECENT_MICRO_BATCHES = 8192  # about 3 MB per stage
_EVENTS_PER_MICRO_BATCH = 4  # launch, result, and as many arrivals and aborts
_CONTEXT_LAUNCHES = 4  # times the in-flight limit: what came before a window explains its first waits

# Upper bounds of the step histogram's buckets, seconds.
STEP_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Records:
    """Bounded rings of records, one for the driver and one for each stage."""

    def __init__(self, pp_size: int, in_flight_limit: int, started_ns: int) -> None:
        self._in_flight_limit = in_flight_limit
        self._started_ns = started_ns
        self._driver = deque[DriverRecord](maxlen=_EVENTS_PER_MICRO_BATCH * _RECENT_MICRO_BATCHES)
        self._stages = [deque[StageRecord](maxlen=_RECENT_MICRO_BATCHES) for _ in range(pp_size)]
        self._last_launched = -1
        self.in_flight_at_launch: Counter[int] = Counter()
        self.requests_in_micro_batch: Counter[int] = Counter()
        self.stage_busy_s = [0.0] * pp_size
        self.graph_steps = [0] * pp_size
        self.steps_in_bucket = [[0] * (len(STEP_BUCKETS_S) + 1) for _ in range(pp_size)]

    def add_event(self, record: DriverRecord) -> None:
        """Takes in an event in the driver; in their order."""
        self._driver.append(record)
        if record.event == "launch":
            self._last_launched = record.micro_batch_id
            self.in_flight_at_launch[record.in_flight] += 1
            self.requests_in_micro_batch[record.num_requests] += 1

    def add_step(self, record: StageRecord, used_graph: bool = False) -> None:
        """Takes in a stage's record of a micro-batch; of each stage in their order."""
        self._stages[record.stage].append(record)
        busy_s = (record.sample_end_ns - record.compute_start_ns) * 1e-9
        self.stage_busy_s[record.stage] += busy_s
        self.graph_steps[record.stage] += used_graph
        self.steps_in_bucket[record.stage][bisect_left(STEP_BUCKETS_S, busy_s)] += 1

    def recording(self, now_ns: int, seconds: float, since_ns: int | None = None) -> Recording:
        """The last `seconds`, or all since `since_ns`, as far as they are remembered, with some records before them.

        It ends now or, if a stage may be at work at present, when its last completed step ended: what it is doing is
        not known before it is done.
        """
        end_ns = min(self._known_until_ns(stage, now_ns) for stage in range(len(self._stages)))
        start_ns = since_ns if since_ns is not None else end_ns - round(seconds * 1e9)
        start_ns = min(max(start_ns, self._complete_since_ns()), end_ns)
        driver = list(self._driver)
        first = _first_needed(driver, start_ns, _CONTEXT_LAUNCHES * self._in_flight_limit)
        first_id = next((r.micro_batch_id for r in driver[first:] if r.event == "launch"), 0)
        stage_records: list[StageRecord] = []
        for ring in self._stages:
            steps = list(ring)
            stage_records += steps[bisect_left(steps, first_id, key=lambda r: r.micro_batch_id) :]
        return Recording(len(self._stages), self._in_flight_limit, start_ns, end_ns, stage_records, driver[first:])

    def _known_until_ns(self, stage: int, now_ns: int) -> int:
        ring = self._stages[stage]
        if self._last_launched < 0 or (ring and ring[-1].micro_batch_id == self._last_launched):
            return now_ns
        last_done, known_until_ns = (ring[-1].micro_batch_id, ring[-1].send_end_ns) if ring else (-1, 0)
        next_launch_ns = 0
        for record in reversed(self._driver):
            if record.event == "launch":
                if record.micro_batch_id <= last_done:
                    break
                next_launch_ns = record.at_ns
        return max(known_until_ns, next_launch_ns)  # until its launch, an idle stage was idle

    def _complete_since_ns(self) -> int:
        """From when on nothing has been forgotten yet."""
        oldest_ns = [ring[0].send_end_ns for ring in self._stages if len(ring) == ring.maxlen]
        if len(self._driver) == self._driver.maxlen:
            oldest_ns.append(self._driver[0].at_ns)
        return max(oldest_ns, default=self._started_ns)


def _first_needed(driver: list[DriverRecord], start_ns: int, context_launches: int) -> int:
    """Position of the launch that lies so many launches before `start_ns`; 0 if there are fewer."""
    position = bisect_left(driver, start_ns, key=lambda r: r.at_ns)
    while position > 0 and context_launches > 0:
        position -= 1
        context_launches -= driver[position].event == "launch"
    return position
